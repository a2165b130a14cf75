"""Free memory of this node's accelerators, which other processes may use too."""

import subprocess
import sys

TIMEOUT_SECONDS = 120
QUERY = """
import sys, torch
module = torch.get_device_module(sys.argv[1])
print(min(module.mem_get_info(index)[0] for index in range(int(sys.argv[2]))))
"""


def least_free_bytes(device_type: str, devices: int) -> int | None:
    """Return the free memory of the fullest of the first devices; None if it cannot be queried.

    The query makes a context on each device, about 0.5 GiB that the caller would hold until its
    end; so a process of its own asks, in a few seconds. The context is not in the result.
    """
    command = [sys.executable, "-c", QUERY, device_type, str(devices)]
    try:
        query = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        return int(query.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
