"""What is special about a Mac, one condition per file: memory, priorities, sleep, Spotlight.

Every function is harmless elsewhere and fails soft here: a system that refuses leaves everything as it was and is
reported by ``deltafin doctor``. May import the standard library only; must not know K3, drives or MLX.
"""
