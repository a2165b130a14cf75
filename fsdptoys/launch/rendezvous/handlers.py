"""Rendezvous of a run's nodes, and the messages when it fails.

- One node: no open port; ranks use a file store in the launcher's folder.
- Several nodes: a TCP store that listens only on the address of ``launch.rdzv_endpoint``. Ranks use
  the same store, under a new key prefix for each start.

All nodes must arrive within ``launch.timeout_seconds`` of the first. After a failure they get at
least a quarter of an hour to return, since a network may be away longer than a collective should
wait.

When a node's network fails, each query of the store blocks for a minute. An agent polling for new
nodes could not watch its own ranks meanwhile, so ``NetworkRendezvous`` polls in a thread. The
ranks' collectives detect lost nodes by their timeout; the node then reconnects to the store for as
long as the others wait.
"""

# ruff: noqa: D102  # the methods are those of RendezvousHandler

import re
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.launcher import LaunchConfig

from fsdptoys.train.launch_env import name_file_store, name_network_store
from fsdptoys.utils.text import print_status

from .endpoint import RendezvousEndpoint
from .signed_state import ForeignStateError, SignedBackend

RETURN_SECONDS = 900.0  # least timeout of a rendezvous after a failure
ASK_SECONDS = 1.0  # interval of polling for waiting nodes
GOODBYE_SECONDS = 5.0  # timeout of announcing to the others that this node leaves
RANKS_KEY = "fsdptoys.ranks"  # key of the prefix under which the ranks of one start keep their keys


class LocalRendezvous(api.RendezvousHandler):
    """Rendezvous of a single node: no port, and a new file store in the launcher's folder for each
    start."""

    use_agent_store = True  # no rank opens a store

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._starts = 0
        self._asking: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether a thread is blocked in the store, so that leaving the interpreter would abort."""
        return self._asking is not None and self._asking.is_alive()

    def get_backend(self) -> str:
        return "fsdptoys"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> api.RendezvousInfo:
        """Name a new store; port 0 makes a rank fail that uses ``env://``."""
        name_file_store(self._folder, self._starts)
        self._starts += 1
        return api.RendezvousInfo(
            HashStore(), 0, 1, api.RendezvousStoreInfo("127.0.0.1", 0)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class MissingNodesError(api.RendezvousTimeoutError):
    """Not all nodes came in time; the message says so in one sentence."""


class _ArrivalTimeout(RendezvousTimeout):
    """Torch's timeouts, with one for the arrival of all nodes that may change between two
    rendezvous."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    @property
    def join(self) -> timedelta:
        return timedelta(seconds=self.seconds)


class NetworkRendezvous(LocalRendezvous):
    """Torch's rendezvous of several nodes, polled in a thread so that a failed network does not
    block the agent.

    The timeout of the first rendezvous is in ``launch.rdzv_configs``.
    """

    def __init__(self, folder: Path, launch: LaunchConfig, token: bytes | None) -> None:
        super().__init__(folder, launch.run_id)
        self._launch = launch
        self._token = token
        self._point = RendezvousEndpoint(launch.rdzv_endpoint)
        self._timeout = _ArrivalTimeout(launch.rdzv_configs["timeout"])
        # kept: their threads complain if they hold the last reference
        self._retired: list[api.RendezvousHandler] = []
        self._complete = False
        self._waiting = 0
        self._enough = threading.Event()
        self._connect()

    def _connect(self) -> None:
        launch = self._launch
        # Machines of a run start at different times; a lost connection is tried again in
        # ``next_rendezvous``.
        store = self._point.connect(None if self._complete else self._timeout.seconds)
        self._backend = SignedBackend(
            store, launch.run_id, self._token, launch.rdzv_endpoint
        )
        self._handler = DynamicRendezvousHandler.from_backend(
            launch.run_id,
            store,
            self._backend,
            launch.min_nodes,
            launch.max_nodes,
            launch.local_addr,
            self._timeout,
        )

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def next_rendezvous(self) -> api.RendezvousInfo:
        """Wait for all nodes, and reconnect if a connection fails after the first time;
        RendezvousError otherwise."""
        if self._complete:
            self._timeout.seconds = max(self._timeout.seconds, RETURN_SECONDS)
        deadline = time.monotonic() + self._timeout.seconds
        lost = not self._stop_asking()
        while True:
            try:
                if lost:
                    self._retired.append(self._handler)
                    self._connect()
                info = self._handler.next_rendezvous()
                prefix = _agree_on_prefix(info)
                break
            except api.RendezvousTimeoutError as error:
                raise self._describe_missing_nodes() from error
            except api.RendezvousConnectionError:
                if not self._complete or time.monotonic() > deadline:
                    raise
                if not lost:
                    self._warn_no_answer()
                lost = True
                time.sleep(ASK_SECONDS)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # Only the state is signed, not the other keys.
                raise ForeignStateError(
                    f"launch.rdzv_endpoint={self._point.endpoint} cannot be trusted: something "
                    "else than this run writes there; use another port and a network that is "
                    "trusted"
                ) from error
        self._complete = True
        name_network_store(self._point.host, self._point.port, prefix)
        self._enough = threading.Event()
        arguments = (self._handler, self._enough)
        self._asking = threading.Thread(
            target=self._ask, args=arguments, name="rendezvous", daemon=True
        )
        self._asking.start()
        here = api.RendezvousStoreInfo(self._point.host, self._point.port)
        return api.RendezvousInfo(info.store, info.rank, info.world_size, here)

    def num_nodes_waiting(self) -> int:
        return self._waiting

    def shutdown(self) -> bool:
        """Announce to the others that this node leaves; return whether that succeeded in time."""
        if not self._stop_asking():
            return False
        self._asking = threading.Thread(
            target=self._handler.shutdown, name="rendezvous", daemon=True
        )
        self._asking.start()
        self._asking.join(GOODBYE_SECONDS)
        return not self._asking.is_alive()

    def _ask(self, handler: api.RendezvousHandler, enough: threading.Event) -> None:
        while not enough.wait(ASK_SECONDS):
            try:
                waiting = handler.num_nodes_waiting()
            except api.RendezvousError:
                continue  # the ranks' collectives detect lost nodes
            if not enough.is_set():
                self._waiting = waiting

    def _stop_asking(self) -> bool:
        """Stop the polling thread; return whether it ended, which shows that the store answers."""
        self._enough.set()
        self._waiting = 0
        if self._asking is not None:
            self._asking.join(GOODBYE_SECONDS)
            if self._asking.is_alive():
                self._warn_no_answer()
                return False
        return True

    def _describe_missing_nodes(self) -> MissingNodesError:
        endpoint = f"launch.rdzv_endpoint={self._point.endpoint}"
        seconds = f"{self._timeout.seconds:g}"
        nodes = f"launch.nnodes={self._launch.min_nodes}"
        if self._complete:
            return MissingNodesError(
                f"{nodes} machines did not all return to {endpoint} within {seconds} s after a "
                "failure; start the run again on each"
            )
        return MissingNodesError(
            f"{nodes} machines were expected at {endpoint}, and {self._backend.most_nodes} came "
            f"within launch.timeout_seconds={seconds}; start the same command on each, or set "
            "launch.nnodes to their number"
        )

    def _warn_no_answer(self) -> None:
        print_status(f"launch.rdzv_endpoint={self._point.endpoint} does not answer")


def make_rendezvous(
    launch: LaunchConfig, folder: Path, token: bytes | None
) -> LocalRendezvous:
    """Open the rendezvous of a run, or connect to it, with the secret shared by the nodes, if any.

    RendezvousConnectionError if the connection fails, ValueError for an invalid endpoint.
    """
    if launch.min_nodes == 1:
        return LocalRendezvous(folder, launch.run_id)
    return NetworkRendezvous(folder, launch, token)


def _agree_on_prefix(info: api.RendezvousInfo) -> str:
    """Return the key prefix of this start's ranks, chosen by the first node."""
    try:
        if info.rank == 0:
            info.store.set(RANKS_KEY, f"ranks/{uuid.uuid4().hex}")
        prefix = info.store.get(RANKS_KEY).decode()
    except RuntimeError as error:
        raise api.RendezvousConnectionError(
            "the connection to the store has failed"
        ) from error
    if not re.fullmatch(r"ranks/[0-9a-f]{32}", prefix):
        raise ValueError("another prefix")
    return prefix


def describe_rendezvous_error(error: Exception, launch: LaunchConfig) -> str:
    """Return one sentence on why the rendezvous failed."""
    if isinstance(error, ForeignStateError | MissingNodesError):
        return str(error)
    if isinstance(error, api.RendezvousClosedError):
        return "another machine ended the run; its output says why"
    cause = str(error.__cause__ or error).splitlines()[0]
    return (
        f"launch.rdzv_endpoint={launch.rdzv_endpoint} cannot host the rendezvous ({cause}); set "
        "it to the first machine's name and a free port, as host:port"
    )
