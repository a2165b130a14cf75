"""Version-guarded fixes of PyTorch internals, one file per patch."""

from .patch import Patch as Patch
from .registry import PATCHES as PATCHES
from .registry import AppliedPatches as AppliedPatches
from .registry import apply_patches as apply_patches
from .registry import check_patches as check_patches
