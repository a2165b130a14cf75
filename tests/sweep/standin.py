"""Stand-in for ``fsdptoys train`` where the training does not matter: its arguments decide how the
process ends.

``train.seed`` chooses: 0 succeeds at once; 1 fails with a reason; 2 runs out of memory; 3 is
killed; 4 exits with an error status and no outcome; 5 waits until it is stopped; 6 does so and only
notes SIGHUP; 7 stops cleanly on request; 8 waits as 5 does, with the inherited SIGHUP handler.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def note(*_: object) -> None:
    Path(outcome.parent, "asked").touch()


overrides = dict(word.split("=", 1) for word in sys.argv[1:])
outcome = Path(os.environ["FSDPTOYS_OUTCOME_FILE"])
print("words", *sys.argv[1:], flush=True)
Path(overrides["metrics.run_dir"].strip("'").replace("\\'", "'")).mkdir()
outcomes = {
    "0": {"status": 0},
    "1": {"status": 1, "reason": "rank 1 failed: RuntimeError: no"},
    "2": {
        "status": 1,
        "reason": "rank 0 failed: host memory ran out on rank 0",
        "out_of_memory": True,
    },
    "7": {"status": 0, "stopped_by": "SIGTERM"},
}
how = overrides["train.seed"]
if how == "3":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "4":
    sys.exit(7)
if how in ("5", "6", "8"):
    if how != "8":
        signal.signal(signal.SIGHUP, note if how == "6" else signal.SIG_DFL)
    Path(outcome.parent, "ready").write_text(str(os.getpid()))
    while True:  # a Python handler waits for the end of a sleep that starts just after its signal
        time.sleep(0.01)
outcome.write_text(json.dumps(outcomes[how]))
sys.exit(outcomes[how]["status"])
