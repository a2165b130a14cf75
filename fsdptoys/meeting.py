"""Where the machines of a run find each other, and what to say when they do not.

torch's rendezvous waits without end for a service that takes a connection and says nothing, as one may do that has the
port for something else. So where somebody listens, another process asks first whether it is one of ours; a thread that
waits so could not be ended.
"""

import socket
import subprocess
import sys

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import LaunchConfig

MEETING_SECONDS = 900
"""How long machines wait for each other."""

ANSWER_SECONDS = 20
"""How long a meeting point may take to answer, once somebody listens there; most of it is for importing torch."""

DEFAULT_PORT = 29400
"""torch's, for an endpoint that names none."""


def meet(launch: LaunchConfig) -> RendezvousHandler:
    """Open the meeting point, or connect to it.

    Raises:
        RendezvousConnectionError: if that fails.
        ValueError: for an endpoint that is none.
    """
    if launch.min_nodes > 1:
        _check_answer(launch.rdzv_endpoint)
    parameters = RendezvousParameters(
        backend=launch.rdzv_backend,
        endpoint=launch.rdzv_endpoint,
        run_id=launch.run_id,
        min_nodes=launch.min_nodes,
        max_nodes=launch.max_nodes,
        local_addr=launch.local_addr,
        timeout=MEETING_SECONDS,
    )
    return get_rendezvous_handler(parameters)


def no_meeting(error: Exception, launch: LaunchConfig) -> str:
    """One sentence on why the machines did not meet."""
    if isinstance(error, RendezvousClosedError):
        return "another machine ended the run; its output says why"
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"launch.nnodes={launch.min_nodes} machines did not all come to "
            f"launch.rdzv_endpoint={launch.rdzv_endpoint} within {MEETING_SECONDS} s; start the same command on each"
        )
    cause = str(error.__cause__ or error).splitlines()[0]
    return (
        f"launch.rdzv_endpoint={launch.rdzv_endpoint} is no place to meet ({cause}); set it to the first machine's "
        "name and a free port, as host:port"
    )


def _check_answer(endpoint: str) -> None:
    host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    try:
        socket.create_connection((host, port), 5.0).close()
    except OSError:
        return  # nobody is there yet
    ask = f"from torch.distributed import TCPStore; TCPStore({host!r}, {port}, is_master=False, wait_for_workers=False)"
    try:
        subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True, timeout=ANSWER_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        raise RendezvousConnectionError("something else has that port") from None
