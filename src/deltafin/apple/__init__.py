"""K3 and its drafts on MLX, for Apple Silicon; the same code runs on MLX's CPU backend elsewhere.

May import: mlx, ``mlx_lm``'s model files, ``checkpoint``, ``drafting``, ``store``, ``streaming``, ``errors``. Must not
import PyTorch, directly or through another room, and must not know the generation loop, text or the terminal.
"""
