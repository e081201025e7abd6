"""One model file of ``mlx-lm``, without the rest of that package.

``import mlx_lm`` brings its generator, its downloader and ``transformers``, which imports PyTorch where that is
installed and takes seconds. The layers need none of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

from deltafin.errors import MachineError

_PACKAGE = "mlx_lm"
_lock = threading.Lock()


def model_file(name: str) -> Any:
    """The module ``mlx_lm.models.<name>``.

    Raises:
        MachineError: ``mlx-lm`` is not installed, or its version lacks the file.
    """
    with _lock:
        full = f"{_PACKAGE}.models.{name}"
        if full in sys.modules:
            return sys.modules[full]
        stand_in = None
        try:
            if _PACKAGE not in sys.modules:
                spec = importlib.util.find_spec(_PACKAGE)
                if spec is None:
                    raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
                # Only the folder of the package: its own __init__ is what must not run.
                stand_in = ModuleType(_PACKAGE)
                stand_in.__path__ = list(spec.submodule_search_locations or ())
                sys.modules[_PACKAGE] = stand_in
            return importlib.import_module(full)
        except ImportError as e:
            raise MachineError(f"mlx-lm cannot be used ({e})", remedy="pip install 'mlx-lm>=0.32'") from None
        finally:
            # Whoever imports the package later in this process gets the real one.
            if stand_in is not None and sys.modules.get(_PACKAGE) is stand_in:
                del sys.modules[_PACKAGE]
