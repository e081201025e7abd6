"""Guessing ahead: DSpark, Qwen, and the economics that decide whether to draft and how wide.

A draft is free to be wrong: it sees committed tokens and the target's hidden states, and returns ids. Nothing here can
decide a token. May import ``kernels``, ``checkpoint``, ``text`` (Qwen re-tokenises) and ``errors``; must not know the
generation loop, stores or drives.
"""
