"""K3 as released, read-only: configuration, tensor index, expert byte layout, spine inventory.

Knows file formats and names; must not know drives, manifests, caches, threads or arithmetic. May import
``errors``. Everything here treats its input as hostile: sizes are bounded before allocation and no path
leaves its folder.
"""

from deltafin.checkpoint.checkpoint import METADATA_FILES, Checkpoint, Run, merged_runs
from deltafin.checkpoint.config import K3Config, NumericChoices
from deltafin.checkpoint.inventory import TensorSpec, expert_inventory, spine_inventory
from deltafin.checkpoint.tensorfile import TensorInfo

__all__ = [
    "METADATA_FILES",
    "Checkpoint",
    "K3Config",
    "NumericChoices",
    "Run",
    "TensorInfo",
    "TensorSpec",
    "expert_inventory",
    "merged_runs",
    "spine_inventory",
]
