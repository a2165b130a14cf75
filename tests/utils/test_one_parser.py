"""Foreign files are parsed by one module only."""

import re
from pathlib import Path

import fsdptoys

ROOT = Path(fsdptoys.__file__).parent

CALLS = re.compile(
    r"\b(json|yaml|pickle|marshal|torch)\.(load|loads|safe_load|full_load|unsafe_load)\(|\bpickle\.Unpickler\)"
)

OWN_FILES = {
    "data/document_reader.py": "one field of a row of bounded length, eight times as fast; errors name the row",
    "launch/failures.py": "written by this launcher's ranks into a folder of mode 0700",
    "plan/trace/tracing_process.py": "exchanged between a process and its child, over their own pipes",
    "plan/trace/tracer.py": "handed over between a process and its child, in a folder of mode 0700",
    "train/launch_env.py": "an environment variable that this rank's launcher has set",
    "launch/rendezvous_state.py": "the state that torch's rendezvous pickled in this process",
    "report/figures_plotly.py": "made by plotly in this process",
    "report/memory_timeline.py": "an unpickler that makes plain values alone",
    "utils/foreign.py": "the parsers themselves",
    "launch/worker.py": "handed over by this rank's launcher, in a folder of mode 0700",
}


def test_foreign_text_is_parsed_in_one_place() -> None:
    """Oracle: the source files; parsers of the standard library and PyYAML are unbounded."""
    calls = {}
    for path in ROOT.rglob("*.py"):
        found = CALLS.search(path.read_text(encoding="utf-8"))
        if found is not None:
            calls[str(path.relative_to(ROOT))] = found[0]
    assert sorted(calls) == sorted(OWN_FILES), {name: call for name, call in calls.items() if name not in OWN_FILES}
