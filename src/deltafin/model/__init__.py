"""K3's text model: pure maths over the bytes it is handed.

Knows layers, tensors and one sequence's state; must not know files, drives, text, drafts or the generation loop. May
import ``kernels``, ``checkpoint.config``, ``streaming`` (to ask for bytes) and ``errors``.
"""
