"""Measurement: synthetic checkpoints of true geometry and the helpers of ``benchmarks/``.

May import every other room; nothing imports it.
"""
