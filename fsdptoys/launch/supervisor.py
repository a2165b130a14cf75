"""Start, watch, restart and end the ranks of this machine, all of them together.

PyTorch's elastic agent (the core of torchrun) starts the workers, meets other nodes and restarts
the workers. It runs in a thread, so that the main thread handles signals:

- SIGTERM, SIGUSR1 and SIGINT (as SIGTERM) are forwarded once, as a request to stop. Ranks in their
  training loop finish the step, save and exit with status 0, and so does the launcher, or with 130
  after SIGINT; other ranks end at once.
- A second request, and any SIGHUP or SIGQUIT, kills all workers at once.
- A signal that ends a single rank ends the run as if the launcher had received it.

After a worker's failure the agent sends SIGTERM to the others and waits for up to 30 seconds; the
main thread kills the remaining ones after a few seconds. A killed rank's child processes get a
moment to end by themselves: one of them, multiprocessing's resource tracker, frees shared memory
that would otherwise stay in /dev/shm. If the launcher itself is killed, Linux kills its workers
(``worker``). A failure that would repeat (a configuration mistake, out of memory, a run that gave
up) prevents a restart.

Not covered: a restart with fewer ranks, and the permanent loss of a node.
"""

import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.launcher import LaunchConfig

from fsdptoys.config import launch_config
from fsdptoys.train.launch_env import (
    LAUNCH_FOLDER,
    LAUNCHED,
    check_interface,
    loopback_environment,
)
from fsdptoys.utils.text import print_status

from .elastic_agent import import_environment
from .failures import name_recordings
from .hardware import check_open_files
from .local_ranks import LocalRanks
from .rendezvous import read_token
from .worker import WorkerRequest, make_launch_folder


def run_workers(
    module: str,
    arguments: Sequence[str],
    local_ranks: int,
    settings: launch_config.LaunchConfig,
    environment: Mapping[str, str],
    request: WorkerRequest | None = None,
    forks: bool = False,
) -> int:
    """Run ``python -m module arguments`` once for each rank of this machine, and wait for all of
    them.

    Args:
        environment: added to the workers' environment.
        request: the composed run, which saves the workers composing it again.
        forks: start workers as forks of this process on Linux, which saves their imports. The
            process must not have used an accelerator or computed with several threads.

    Returns:
        0 after success, 1 after a worker's exception, 2 after a ``ConfigError``, 128 + number after
        a stop signal.

    Raises:
        ConfigError: for too low a limit of open files, or an invalid network interface or token.
    """
    check_open_files()
    nnodes = settings.nnodes
    loopback = loopback_environment(os.environ) if nnodes == 1 else {}
    check_interface()
    token = read_token(settings.rdzv_token_file) if nnodes > 1 else None
    launch_folder = make_launch_folder(request)
    folder = launch_folder.path
    os.environ.update({**import_environment(os.environ), **environment, **loopback})
    os.environ.update({LAUNCHED: str(os.getpid()), LAUNCH_FOLDER: str(folder)})
    # A killed rank cannot close its semaphores; the tracker frees them, and its warning is noise.
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker"
    )
    # silence the agent's own log; the launcher reports failures itself
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    name_recordings(folder)
    # Otherwise torch's rendezvous opens another store, on all interfaces.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launch = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=local_ranks,
        run_id="fsdptoys" if nnodes > 1 else uuid.uuid4().hex,
        rdzv_endpoint=settings.rdzv_endpoint or "",
        rdzv_configs={"timeout": settings.timeout_seconds},
        local_addr="localhost" if nnodes == 1 else None,
        max_restarts=settings.max_restarts,
    )
    workers = LocalRanks(
        folder,
        launch,
        token,
        ("-m", module, *arguments),
        forks and sys.platform == "linux",
    )
    try:
        with workers.handling_signals():
            status, message = workers.run()
    finally:
        launch_folder.remove()
        for name in loopback:  # a later run of this process may be on several machines
            os.environ.pop(name, None)
    if message:
        if sys.stdout is not None and sys.stdout.isatty():
            # A killed worker may have left the cursor hidden, within a line.
            print("\x1b[?25h", end="\n" if workers.ended else "", flush=True)
        print_status(message)
    if workers.left_behind:
        if sys.stdout is not None:
            sys.stdout.flush()
        # leaving the interpreter aborts where a thread is inside the rendezvous
        os._exit(status)
    return status
