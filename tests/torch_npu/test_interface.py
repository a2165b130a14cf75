"""Our calls of torch_npu exist in its wheels, with the parameters that we pass; no code of the wheels runs.

Every name used in our sources, found by parsing them, has its line in ``interface.py``; every line is in both
wheels.
"""

from pathlib import Path

import pytest

from tests.torch_npu.environment import NEWEST, OLDEST
from tests.torch_npu.interface import (
    CANN_VARIABLES,
    HANDED,
    NAMED_ONLY,
    NAMES,
    NOT_READ,
    NOT_TORCH_NPU,
    NOT_VARIABLES,
    OPERATORS,
    TEXTS,
    VARIABLES,
)
from tests.torch_npu.uses import Use, Uses, uses_of
from tests.torch_npu.wheel import Wheel

pytestmark = pytest.mark.torch_npu

ROOT = Path(__file__).parents[2]
FOLDERS = ("fsdptoys", "models", "patches", "scripts")
VERSIONS = (NEWEST, OLDEST)


@pytest.fixture(scope="session")
def wheels(environment: Path) -> dict[str, Wheel]:
    return {version: Wheel(environment / "wheels" / version) for version in VERSIONS}


@pytest.fixture(scope="session")
def uses() -> Uses:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path for path in paths if path.resolve() == path]  # models, patches and configs are linked to
    return uses_of({str(path.relative_to(ROOT)): path for path in own}, HANDED)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_used_names_exist_in_the_wheel_with_compatible_parameters(
    wheels: dict[str, Wheel], version: str, name: str
) -> None:
    """Oracle: the wheel's Python, parsed."""
    call = NAMES[name]
    assert wheels[version].find(name) is not None
    if call is not None:
        taken = wheels[version].parameters(name)
        assert taken is not None and taken.accepts(call.positional, frozenset(call.keywords)), taken


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OPERATORS)
def test_used_operators_exist_in_the_wheel_with_compatible_schemas(
    wheels: dict[str, Wheel], version: str, name: str
) -> None:
    """Oracle: the schema in libtorch_npu.so."""
    call, taken = OPERATORS[name], wheels[version].operators.get(name)
    assert taken is not None
    assert call.positional <= len(taken) and set(call.keywords) <= set(taken[call.positional :]), taken


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("text", [*sorted(VARIABLES), *sorted(NOT_VARIABLES), *TEXTS])
def test_used_variables_and_texts_exist_in_the_wheel(wheels: dict[str, Wheel], version: str, text: str) -> None:
    """Oracle: the bytes of its libraries and Python."""
    assert wheels[version].has_text(text)


@pytest.mark.parametrize(
    ("name", "version"),
    [("npu_fusion_attention_v2", NEWEST), ("npu_fusion_attention_v2", OLDEST), ("npu_fusion_attention_v3", NEWEST)],
)
def test_operators_not_called_directly_exist_in_the_wheel(wheels: dict[str, Wheel], name: str, version: str) -> None:
    """Oracle: the schema in libtorch_npu.so."""
    assert name in NAMED_ONLY and name in wheels[version].operators


def test_missing_names_and_parameters_are_detected(wheels: dict[str, Wheel]) -> None:
    """Oracle: names and parameters absent from the newest wheel."""
    wheel = wheels[NEWEST]
    assert wheel.find("torch_npu.npu.memory_alocated") is None
    assert wheel.find("torch_npu.npu.Stream.wait_for") is None
    schedule = wheel.parameters("torch_npu.profiler.schedule")
    assert schedule is not None and not schedule.accepts(0, frozenset({"skip"}))
    history = wheel.parameters("torch_npu.npu.memory._record_memory_history")
    assert history is not None and not history.accepts(0, frozenset({"clear_history"}))  # exists in CUDA's


def test_every_name_used_in_our_sources_is_listed(uses: Uses) -> None:
    """Oracle: our sources, parsed; and every line is in use."""
    assert uses.names.keys() - NAMES.keys() == set()
    assert NAMES.keys() - uses.names.keys() == NOT_READ
    for name, use in uses.names.items():
        call = NAMES[name]
        assert (call is not None) == use.called, name
        assert call is None or _within(use, call.positional, call.keywords), (name, use)


def test_every_used_operator_variable_and_stream_method_is_listed(uses: Uses) -> None:
    """Oracle: our sources, parsed."""
    assert uses.operators.keys() - OPERATORS.keys() - NAMED_ONLY - NOT_TORCH_NPU == set()
    for name in OPERATORS:
        assert _within(uses.operators[name], OPERATORS[name].positional, OPERATORS[name].keywords), name
    assert uses.variables - VARIABLES - CANN_VARIABLES - NOT_VARIABLES == set()
    assert {f"torch_npu.npu.Stream.{method}" for method in uses.stream_methods} <= NAMES.keys()


def _within(use: Use, positional: int, keywords: tuple[str, ...]) -> bool:
    return use.positional <= positional and use.keywords <= set(keywords)
