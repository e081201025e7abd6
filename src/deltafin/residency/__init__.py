"""What stays in memory and why: the split of the RAM budget, and which experts are worth keeping.

Knows sizes, ids and counters; holds no file, thread or tensor, so every decision can be replayed from a trace. May
import ``errors`` and ``checkpoint.config``.
"""
