"""Bytes on their way: expert leases in arrival order, spine layers double-buffered.

Knows layers, expert numbers and buffers; must not know the model's arithmetic, tokens or sessions. May import
``store``, ``residency``, ``expert_layout`` and ``errors``. The model asks; nothing here ever calls the model.
"""
