"""Explain failures of ``import torch`` itself; nothing here imports torch.

PyTorch imports every installed distribution with an entry point in the group ``torch.backends``, such as torch_npu;
without CANN's libraries the import ends in a traceback. So does an import with an invalid ``LOGLEVEL``.
"""

import logging
import re
from collections.abc import Mapping

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line


def check_log_level(environment: Mapping[str, str]) -> None:
    """Check ``LOGLEVEL``, which torch's elastic agent uses at import.

    Raises:
        ConfigError: if logging has no such level.
    """
    level = environment.get("LOGLEVEL")
    if level is not None and not isinstance(logging.getLevelName(level), int):
        raise ConfigError(
            f"LOGLEVEL={one_line(level)} in the environment is no level; set it to DEBUG, INFO, WARNING or ERROR, or "
            "unset it"
        )


def explain_autoload(error: BaseException) -> str | None:
    """Return a sentence with backend, reason and fix; None for other errors."""
    named = re.search(r"Failed to load the backend extension: (\S+?)\.? ", f"{error} ")
    if not isinstance(error, RuntimeError) or named is None or error.__cause__ is None:
        return None
    backend = named[1]
    reason = (str(error.__cause__).strip().splitlines() or [type(error.__cause__).__name__])[0]
    wanted = "to do without it"
    if "npu" in backend:
        # torch_npu rejects a CUDA build of PyTorch before it looks for CANN.
        missing = "the CANN that it is made for and source its set_env.sh"
        missing = "PyTorch's build for CPUs" if "Two accelerators" in reason else missing
        wanted = f"to use NPUs install {missing}, and to do without them"
    return (
        f"PyTorch cannot be imported, since the installed {backend} cannot be loaded [{reason}]; {wanted} set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment"
    )
