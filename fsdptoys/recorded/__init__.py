"""What runs have left in their directories, read back: for calibration, tables, pictures and comparisons."""

from .run import MOST_RANKS, RecordedRun, is_run_dir, read_recorded_run, read_warmup
from .settings import read_config, read_data_config, read_tree
from .writing import is_written, newest_signs

__all__ = [
    "MOST_RANKS",
    "RecordedRun",
    "is_run_dir",
    "is_written",
    "newest_signs",
    "read_config",
    "read_data_config",
    "read_recorded_run",
    "read_tree",
    "read_warmup",
]
