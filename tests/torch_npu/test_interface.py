"""Our calls of torch_npu exist in its wheels, with the parameters that we pass; no code of the
wheels runs.

The names are those used in our sources, found by parsing them, and those listed here.
"""

from pathlib import Path

import pytest

from tests.torch_npu.environment import NEWEST, OLDEST
from tests.torch_npu.uses import Use, Uses, uses_of
from tests.torch_npu.wheel import Wheel

pytestmark = pytest.mark.torch_npu

ROOT = Path(__file__).parents[2]
FOLDERS = ("fsdptoys", "models", "patches", "scripts")
NPU = "torch_npu.npu"
PROFILER = "torch_npu.profiler"

UNREAD = {
    f"{NPU}.Event.elapsed_time": Use(1),
    f"{NPU}.Event.record": Use(1),
    f"{NPU}.Event.synchronize": Use(),
    f"{NPU}.Stream.record_event": Use(),
    f"{NPU}.Stream.synchronize": Use(),
    f"{NPU}.Stream.wait_event": Use(1),
    f"{NPU}.Stream.wait_stream": Use(1),
    f"{PROFILER}.profile": Use(
        keywords={"record_shapes", "profile_memory", "with_stack"}
    ),
    f"{PROFILER}.schedule": Use(
        keywords={"skip_first", "wait", "warmup", "active", "repeat"}
    ),
}
"""Calls that no source spells out: methods of objects that are passed on, and arguments in a
dict."""

LEVELS = [f"{PROFILER}.ProfilerLevel.Level{level}" for level in range(3)]
"""For the values of profile.npu_level."""

HANDED = {("fsdptoys/profiler/memory_snapshot.py", "_memory"): f"{NPU}.memory"}
"""(source, attribute) → the object passed in from another source."""

NAMED_ONLY = {"npu_fusion_attention_v2", "npu_fusion_attention_v3"}
"""Operators that a run meets if other code calls them; the latter exists since a version after
2.7.1."""

NOT_TORCH_NPU = {
    "npu_level",
    "npu_kernels",
    "npu_fusion_attention_backward",
    "npu_swiglu_backward",
}
"""Texts in our sources that look like operators: a key, a module, and the planner's stand-ins."""

CANN_VARIABLES = {"ASCEND_RT_VISIBLE_DEVICES", "HCCL_BUFFSIZE", "HCCL_DETERMINISTIC"}
"""Environment variables read by CANN, which is not installed here."""

TEXTS = (
    "NPU out of memory",
    " total capacity",
    "already allocated",
    "reserved in total",
    "op_statistic",
    "_ascend_pt",
)
"""Texts of errors and files that our code looks for."""


@pytest.fixture(scope="module", params=[NEWEST, OLDEST])
def wheel(environment: Path, request: pytest.FixtureRequest) -> Wheel:
    """Either of the supported versions at the ends."""
    return Wheel(environment / "wheels" / request.param)


@pytest.fixture(scope="module")
def uses() -> Uses:
    """What our sources use."""
    paths = [
        path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    # Models, patches and configs are linked to
    own = [path for path in paths if path.resolve() == path]
    return uses_of({str(path.relative_to(ROOT)): path for path in own}, HANDED)


def accepts(wheel: Wheel, name: str, use: Use) -> bool:
    parameters = wheel.parameters(name)
    return parameters is not None and parameters.accepts(
        use.positional, frozenset(use.keywords)
    )


def test_used_names_exist_in_the_wheel(wheel: Wheel, uses: Uses) -> None:
    """Oracle: the wheel's Python, parsed."""
    assert [
        name for name in (*uses.names, *UNREAD, *LEVELS) if wheel.find(name) is None
    ] == []


def test_used_functions_of_the_wheel_have_the_parameters(
    wheel: Wheel, uses: Uses
) -> None:
    """Oracle: the wheel's Python, parsed."""
    calls = [
        *UNREAD.items(),
        *((name, use) for name, use in uses.names.items() if use.called),
    ]
    assert [(name, use) for name, use in calls if not accepts(wheel, name, use)] == []


def test_used_operators_exist_in_the_wheel_with_compatible_schemas(
    wheel: Wheel, uses: Uses
) -> None:
    """Oracle: the schema in libtorch_npu.so."""
    for name in uses.operators.keys() - NAMED_ONLY - NOT_TORCH_NPU:
        use = uses.operators[name]
        parameters = wheel.operators[name]
        assert use.called and use.positional <= len(parameters), name
        assert use.keywords <= set(parameters[use.positional :]), name


def test_used_variables_exist_in_the_wheel(wheel: Wheel, uses: Uses) -> None:
    """Oracle: the bytes of its libraries and Python."""
    assert [
        name for name in uses.variables - CANN_VARIABLES if not wheel.has_text(name)
    ] == []


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_we_look_for_exist_in_the_wheel(wheel: Wheel, text: str) -> None:
    """Oracle: the bytes of its libraries and Python."""
    assert wheel.has_text(text)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("npu_fusion_attention_v2", NEWEST),
        ("npu_fusion_attention_v2", OLDEST),
        ("npu_fusion_attention_v3", NEWEST),
    ],
)
def test_operators_not_called_directly_exist_in_the_wheel(
    environment: Path, name: str, version: str
) -> None:
    """Oracle: the schema in libtorch_npu.so."""
    assert (
        name in NAMED_ONLY and name in Wheel(environment / "wheels" / version).operators
    )


def test_missing_names_and_parameters_are_detected(environment: Path) -> None:
    """Oracle: names and parameters absent from the newest wheel."""
    wheel = Wheel(environment / "wheels" / NEWEST)
    assert wheel.find("torch_npu.npu.memory_alocated") is None
    assert wheel.find("torch_npu.npu.Stream.wait_for") is None
    assert not accepts(wheel, "torch_npu.profiler.schedule", Use(keywords={"skip"}))
    # CUDA's has this parameter.
    assert not accepts(
        wheel,
        "torch_npu.npu.memory._record_memory_history",
        Use(keywords={"clear_history"}),
    )


def test_uses_of_every_kind_are_found(uses: Uses) -> None:
    """Oracle: a name, an operator and a variable that our sources use, and the methods of
    streams."""
    assert f"{NPU}.current_stream" in uses.names
    assert uses.operators["npu_rms_norm"].positional == 3
    assert "PYTORCH_NPU_ALLOC_CONF" in uses.variables
    assert uses.stream_methods <= {name.rpartition(".")[2] for name in UNREAD}
