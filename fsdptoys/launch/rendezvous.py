"""Where the machines of a run find each other, and what to say when they do not.

A single machine meets nobody: ``OneMachine`` opens no port, and its ranks find each other at a file in the launcher's
folder. Several machines meet at a store that listens on the address of ``launch.rdzv_endpoint`` alone; its state is
JSON (``rendezvous_state``), never a pickle. Their ranks find each other at the same store, under other keys for each
start.

torch's rendezvous waits without end for a service that takes a connection and says nothing, as one may do that has the
port for something else. So where somebody listens, another process asks first whether it is one of ours; a thread that
waits so could not be ended.

A machine whose network fails has the same trouble with a meeting point that it knew: each question waits for a minute,
and its agent, which asks all the time whether others want to come, sees nothing of its own ranks for so long. So
``Meeting`` asks in a thread of its own. What the network cannot tell, the ranks' collectives do, after their timeout;
then the machine comes to the meeting point again, over a new connection, for as long as the others wait for it.
"""

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.launcher import LaunchConfig

from fsdptoys.train.rank_store import name_file_store, name_network_store

from .rendezvous_server import MeetingPoint
from .rendezvous_state import ForeignStateError, SignedBackend

MEETING_SECONDS = 900
"""How long machines wait for each other."""

ASK_SECONDS = 1.0
"""How often a machine asks whether others want to come."""

GOODBYE_SECONDS = 5.0
"""How long a machine tries to tell the others that it ends."""


RANKS_KEY = "fsdptoys.ranks"
"""Prefix of the keys of the ranks of one start, in the store of that round of the rendezvous."""


class OneMachine(RendezvousHandler):
    """The rendezvous of one machine with itself: no port, and another store for each start of the ranks.

    Args:
        folder: the launcher's, of mode 0700.
        run_id: the run's name.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id
        self._starts = 0

    def get_backend(self) -> str:
        """Its name."""
        return "fsdptoys"

    @property
    def use_agent_store(self) -> bool:
        """No rank listens for the others."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Name another store; the port is none, for a rank that would use ``env://``."""
        name_file_store(self._folder, self._starts)
        self._starts += 1
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do."""
        return True


class Meeting(RendezvousHandler):
    """Torch's rendezvous of several machines, which does not keep its caller waiting where the network fails.

    Args:
        make: opens the meeting point, or connects to it.
        point: it.
    """

    def __init__(self, make: Callable[[], RendezvousHandler], point: MeetingPoint) -> None:
        self._make, self._point = make, point
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
        """No rank listens for the others."""
        return True

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
                prefix = _agree_on_prefix(info)
                break
            except RendezvousConnectionError:
                if not self._met or time.monotonic() > deadline:
                    raise
                if not lost:
                    self._tell()
                lost = True
                time.sleep(ASK_SECONDS)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # Keys beside the state are not signed.
                raise ForeignStateError(
                    f"launch.rdzv_endpoint={self._point.endpoint} cannot be trusted: something else than this run "
                    "writes there; use another port and a network that is trusted"
                ) from error
        self._met = True
        name_network_store(self._point.host, self._point.port, prefix)
        self._enough = threading.Event()
        self._asking = threading.Thread(
            target=self._ask, args=(self._handler, self._enough), name="rendezvous", daemon=True
        )
        self._asking.start()
        here = RendezvousStoreInfo(self._point.host, self._point.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, here)

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
        print(f"fsdptoys: launch.rdzv_endpoint={self._point.endpoint} does not answer", file=sys.stderr, flush=True)


def meet(launch: LaunchConfig, folder: Path, token: bytes | None) -> RendezvousHandler:
    """Open the meeting point, or connect to it.

    Args:
        launch: the machines, and where they meet.
        folder: the launcher's.
        token: secret of all machines; None for none.

    Raises:
        RendezvousConnectionError: if that fails.
        ValueError: for an endpoint that is none.
    """
    if launch.min_nodes == 1:
        return OneMachine(folder, launch.run_id)
    point = MeetingPoint(launch.rdzv_endpoint)

    def make() -> RendezvousHandler:
        store = point.connect()
        return DynamicRendezvousHandler.from_backend(
            launch.run_id,
            store,
            SignedBackend(store, launch.run_id, token, launch.rdzv_endpoint),
            launch.min_nodes,
            launch.max_nodes,
            launch.local_addr,
            RendezvousTimeout(join=timedelta(seconds=MEETING_SECONDS)),
        )

    return Meeting(make, point)


def _agree_on_prefix(info: RendezvousInfo) -> str:
    """What the keys of this start's ranks begin with; the first machine chooses it."""
    store: Store = info.store
    try:
        if info.rank == 0:
            store.set(RANKS_KEY, f"ranks/{uuid.uuid4().hex}")
        prefix = store.get(RANKS_KEY).decode()
    except RuntimeError as error:
        raise RendezvousConnectionError("the connection to the store has failed") from error
    if not re.fullmatch(r"ranks/[0-9a-f]{32}", prefix):
        raise ValueError("another prefix")
    return prefix


def no_meeting(error: Exception, launch: LaunchConfig) -> str:
    """One sentence on why the machines did not meet."""
    if isinstance(error, ForeignStateError):
        return str(error)
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
