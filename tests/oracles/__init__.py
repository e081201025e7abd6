"""Independent implementations the engine is judged against.

``released`` reads files, ``float64`` and ``dspark_float64`` are slow float64 models written from the published
description, ``mlx_k3`` drives mlx-lm's implementation, ``tiny`` writes a small checkpoint whose results are known in
advance, ``real_geometry`` compares layers of the true dimensions.

May import numpy, safetensors, mlx and mlx-lm. Must not import ``deltafin``: an oracle that shares code with what it
judges proves nothing. Must not know about drives, kernels, caches or budgets.
"""
