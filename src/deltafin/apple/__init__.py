"""K3 and its drafts on MLX, for Apple Silicon; the same code runs on MLX's CPU backend elsewhere.

Bytes land in MLX's own memory (``memory``, ``frames``) and are multiplied there. ``target`` is the layer loop, ``kda``,
``mla`` and ``moe`` the sublayers over ``state``, ``weights`` the names. ``rows`` keeps every row's bits independent of
the others, as far as ``probe`` finds it necessary; ``selftest`` compares the kernels with NumPy; ``limits`` bounds
MLX's memory; ``mlx_lm_models`` finds single files of ``mlx-lm``. ``backend`` puts it all behind the contract.

May import: mlx, ``mlx_lm``'s model files, ``contract``, ``expert_layout``, ``checkpoint``, ``drafting``, ``store``,
``streaming``, ``residency``, ``errors``. Must not import PyTorch, directly or through another room, and must not know
the generation loop, text or the terminal.
"""
