"""Where the machines of a run find each other, and what to say when they do not.

torch's rendezvous waits without end for a service that takes a connection and says nothing, as one may do that has the
port for something else. So where somebody listens, another process asks first whether it is one of ours; a thread that
waits so could not be ended.

A machine whose network fails has the same trouble with a meeting point that it knew: each question waits for a minute,
and its agent, which asks all the time whether others want to come, sees nothing of its own ranks for so long. So
``Meeting`` asks in a thread of its own. What the network cannot tell, the ranks' collectives do, after their timeout;
then the machine comes to the meeting point again, over a new connection, for as long as the others wait for it.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
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


ASK_SECONDS = 1.0
"""How often a machine asks whether others want to come."""

GOODBYE_SECONDS = 5.0
"""How long a machine tries to tell the others that it ends."""


class Meeting(RendezvousHandler):
    """Torch's rendezvous of several machines, which does not keep its caller waiting where the network fails.

    Args:
        make: opens the meeting point, or connects to it.
        endpoint: it, for people.
    """

    def __init__(self, make: Callable[[], RendezvousHandler], endpoint: str) -> None:
        self._make, self._endpoint = make, endpoint
        self._handler = make()
        self._left: list[RendezvousHandler] = []  # kept: a thread of theirs complains if it is the last to know them
        self._met = False
        self._waiting = 0
        self._asking: threading.Thread | None = None
        self._enough = threading.Event()

    @property
    def hangs(self) -> bool:
        """Whether a thread is waiting for an answer, so that leaving the interpreter would abort."""
        return self._asking is not None and self._asking.is_alive()

    @property
    def use_agent_store(self) -> bool:
        """As torch's."""
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        """As torch's."""
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        """As torch's."""
        return self._handler.get_run_id()

    def is_closed(self) -> bool:
        """As torch's."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """As torch's."""
        self._handler.set_closed()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines; those that have met before, over a new connection where the old one fails.

        Raises:
            RendezvousError: if they do not come.
        """
        deadline = time.monotonic() + MEETING_SECONDS
        lost = not self._stop_asking()
        while True:
            try:
                if lost:
                    self._left.append(self._handler)
                    self._handler = self._make()
                info = self._handler.next_rendezvous()
                break
            except RendezvousConnectionError:
                if not self._met or time.monotonic() > deadline:
                    raise
                if not lost:
                    self._tell()
                lost = True
                time.sleep(ASK_SECONDS)
        self._met = True
        self._enough = threading.Event()
        self._asking = threading.Thread(
            target=self._ask, args=(self._handler, self._enough), name="rendezvous", daemon=True
        )
        self._asking.start()
        return info

    def num_nodes_waiting(self) -> int:
        """Machines that want to come, as far as is known."""
        return self._waiting

    def shutdown(self) -> bool:
        """Tell the others that this machine ends, if they can be told soon."""
        if not self._stop_asking():
            return False
        self._asking = threading.Thread(target=self._handler.shutdown, name="rendezvous", daemon=True)
        self._asking.start()
        self._asking.join(GOODBYE_SECONDS)
        return not self._asking.is_alive()

    def _ask(self, handler: RendezvousHandler, enough: threading.Event) -> None:
        while not enough.wait(ASK_SECONDS):
            try:
                waiting = handler.num_nodes_waiting()
            except RendezvousError:
                continue  # the ranks see whether the others are gone
            if not enough.is_set():
                self._waiting = waiting

    def _stop_asking(self) -> bool:
        """Returns whether the thread ended, which says that the meeting point answers."""
        self._enough.set()
        self._waiting = 0
        if self._asking is not None:
            self._asking.join(GOODBYE_SECONDS)
            if self._asking.is_alive():
                self._tell()
                return False
        return True

    def _tell(self) -> None:
        print(f"fsdptoys: launch.rdzv_endpoint={self._endpoint} does not answer", file=sys.stderr, flush=True)


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
    if launch.min_nodes == 1:
        return get_rendezvous_handler(parameters)
    return Meeting(lambda: get_rendezvous_handler(parameters), launch.rdzv_endpoint)


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
