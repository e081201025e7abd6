"""Builds the native kernels; everything else about the package is in pyproject.toml.

Each instruction set is one source file compiled with its own flags, chosen at run time. Floating-point contraction is
off everywhere: which operations are fused is part of the kernels' contract, not the compiler's choice.
"""

import platform
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/deltafin/kernels/native")
COMMON = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    # GCC 12's own AVX-512 headers start registers from themselves
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
MACHINE = platform.machine().lower()

UNITS: dict[str, list[str]] = {"isa_portable.cpp": []}
MACROS: list[tuple[str, str | None]] = []
if MACHINE in ("x86_64", "amd64"):
    UNITS["isa_avx2.cpp"] = ["-mavx2", "-mfma"]
    UNITS["isa_avx512.cpp"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"]
    MACROS = [("K3_HAVE_X86", "1")]
elif MACHINE in ("aarch64", "arm64"):
    UNITS["isa_neon.cpp"] = []
    MACROS = [("K3_HAVE_NEON", "1")]


class BuildKernels(build_ext):
    """Compiles the instruction-set units with their own flags and links them into the extension."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        objects = []
        for name, flags in UNITS.items():
            objects += self.compiler.compile(
                [str(NATIVE / name)],
                output_dir=self.build_temp,
                include_dirs=[str(NATIVE)],
                extra_postargs=COMMON + flags,
                depends=ext.depends,
            )
        ext.extra_objects = objects
        super().build_extension(ext)


setup(
    ext_modules=[
        Pybind11Extension(
            "deltafin.kernels._native",
            sources=[str(NATIVE / "module.cpp"), str(NATIVE / "runtime.cpp")],
            include_dirs=[str(NATIVE)],
            define_macros=MACROS,
            depends=[str(p) for p in sorted(NATIVE.iterdir())],
            extra_compile_args=[*COMMON, "-pthread"],
            extra_link_args=["-pthread"],
            cxx_std=17,
            # A Mac computes with MLX: these kernels only serve PyTorch, and need not keep it from being installed.
            optional=platform.system() == "Darwin",
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
