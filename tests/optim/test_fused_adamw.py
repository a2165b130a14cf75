"""Fused AdamW: its bits for any split of tensors, clipping and skipping in the kernel, and the
choice of it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.memory import OptimizerStepper
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    MuonConfig,
    OptimConfig,
    OptimStateDType,
    SGDConfig,
)
from fsdptoys.optim.adamw import BFloat16AdamW
from fsdptoys.optim.fused_adamw import FusedAdamW
from fsdptoys.optim.vector_adamw import VECTOR_ELEMENTS
from fsdptoys.parallel.strategy import Strategy

SHAPES = ((33, 7), (64,), (5,))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel of a CPU stand for that of an accelerator, which needs no full vectors."""
    monkeypatch.setattr("fsdptoys.optim.fused_adamw.pads", lambda device: False)


def build_params(
    kind: type[torch.optim.AdamW], **options: Any
) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    return params, kind(params, lr=1e-2, weight_decay=0.1, fused=True, **options)


def draw_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def tensors_of(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    states = [
        state for param in params for _, state in sorted(optimizer.state[param].items())
    ]
    return [tensor.detach().clone() for tensor in (*params, *states)]


class Norms:
    """The clipping of a strategy over plain parameters."""

    tensor_group = pipeline = None

    clip_grad_norm = Strategy.clip_grad_norm
    total_norm = Strategy.total_norm
    local_norms = Strategy.local_norms
    shard_group = Strategy.shard_group
    norm_groups = Strategy.norm_groups

    def __init__(self, params: list[nn.Parameter]) -> None:
        device = SimpleNamespace(torch_device=torch.device("cpu"), is_accelerator=False)
        self.world: Any = SimpleNamespace(
            device=device, sum_dtype=torch.float64, deterministic=False
        )
        self.named_parameters: Any = lambda: enumerate(params)


@pytest.mark.usefixtures("on_device")
def test_steps_equal_pytorchs_bitwise() -> None:
    """Oracle: torch.optim.AdamW(fused=True): parameters and states; a state dict goes both ways."""
    params, optimizer = build_params(FusedAdamW)
    oracle_params, oracle = build_params(torch.optim.AdamW)
    for step in range(4):
        draw_gradients(params, step)
        draw_gradients(oracle_params, step)
        optimizer.step()
        oracle.step()
        for tensor, expected in zip(
            tensors_of(params, optimizer),
            tensors_of(oracle_params, oracle),
            strict=True,
        ):
            assert torch.equal(tensor, expected)
        if step == 1:
            state = optimizer.state_dict()
            other = oracle.state_dict()
            optimizer.load_state_dict(other)
            oracle.load_state_dict(state)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("kind", [FusedAdamW, BFloat16AdamW])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_skipped_step_changes_no_bit(
    kind: type[FusedAdamW], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracles: parameters, moments and step counts before the step of NaN; the run without it."""
    params, optimizer = build_params(kind)
    oracle_params, oracle = build_params(kind)
    updates = OptimizerStepper(optimizer)
    skip = torch.tensor(1.0)
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("read on the host"))
    for step in range(4):
        if step == (0 if when == "first" else 2):
            before = tensors_of(params, optimizer)
            for param in params:
                param.grad = torch.full_like(param, torch.nan)
            updates.step(skip)
            after = tensors_of(params, optimizer)
            if when == "first":  # the step makes states
                before += [torch.zeros_like(tensor) for tensor in after[len(before) :]]
            assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
        for drawn in (params, oracle_params):
            draw_gradients(drawn, step)
        updates.step(torch.tensor(0.0))
        oracle.step()
    tensors = tensors_of(params, optimizer)
    expected = tensors_of(oracle_params, oracle)
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
    assert optimizer.found_inf is None


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("max_norm", [0.5, 1e9], ids=["clipped", "below"])
def test_a_clipped_step_equals_scaling_then_stepping(max_norm: float) -> None:
    """Oracle: gradients multiplied by the factor, then the same kernel: gradients to 2**-22,
    bitwise where 1."""
    params, optimizer = build_params(FusedAdamW)
    oracle_params, oracle = build_params(FusedAdamW)
    updates = OptimizerStepper(optimizer)
    for step in range(3):
        draw_gradients(params, step)
        draw_gradients(oracle_params, step)
        drawn = [param.grad.clone() for param in params]  # type: ignore[union-attr]
        norm = updates.clip(Norms(params), max_norm)  # type: ignore[arg-type]
        for param, grad in zip(params, drawn, strict=True):
            assert torch.equal(param.grad, grad)  # type: ignore[arg-type]
        updates.step(torch.tensor(0.0))
        assert norm == Strategy.clip_grad_norm(Norms(oracle_params), max_norm)  # type: ignore[arg-type]
        oracle.step()
        close = (
            {"rtol": 0.0, "atol": 0.0}
            if max_norm > 1e6
            else {"rtol": 2**-22, "atol": 0.0}
        )
        for param, oracle_param in zip(params, oracle_params, strict=True):
            torch.testing.assert_close(param.grad, oracle_param.grad, **close)
    close = (
        {"rtol": 0.0, "atol": 0.0} if max_norm > 1e6 else {"rtol": 1e-6, "atol": 1e-7}
    )
    for tensor, expected in zip(
        tensors_of(params, optimizer), tensors_of(oracle_params, oracle), strict=True
    ):
        torch.testing.assert_close(tensor, expected, **close)
    assert optimizer.grad_scale is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
def test_auto_is_fused_where_it_is_faster(device: str, deterministic: bool) -> None:
    """Oracle: the rule by hand: on a CPU, and on CUDA outside the deterministic mode; SGD's takes
    no DTensors."""

    def chosen(optim: OptimConfig, on_host: bool = False) -> Implementation:
        optim.resolve(device, deterministic=deterministic, on_host=on_host)
        return optim.implementation

    fused = device == "cpu" or (device == "cuda" and not deterministic)
    expected = Implementation.fused if fused else Implementation.auto
    for optim in (
        AdamWConfig(),
        MuonConfig(),
        AdamWConfig(state_dtype=OptimStateDType.bfloat16),
    ):
        assert chosen(optim) is expected
    assert chosen(SGDConfig()) is Implementation.auto
    offloaded = (
        Implementation.fused
        if device == "cpu" or not deterministic
        else Implementation.auto
    )
    assert chosen(AdamWConfig(), on_host=True) is offloaded


@pytest.mark.parametrize(
    "state_dtype", [OptimStateDType.float32, OptimStateDType.bfloat16]
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "implementation", [Implementation.fused, Implementation.foreach]
)
def test_fused_steps_of_accelerators_skip_on_the_device(
    implementation: Implementation, device: str, state_dtype: OptimStateDType
) -> None:
    """Oracle: the rule by hand; the meta device stands for an accelerator."""
    groups = [{"params": [nn.Parameter(torch.empty(3, device=device))]}]
    optimizer = AdamWConfig(
        implementation=implementation, state_dtype=state_dtype
    ).build(groups)
    skips = device == "meta" and implementation is Implementation.fused
    assert OptimizerStepper(optimizer).skips_on_device is skips


ELEMENTS = 20_003
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def train_parts(
    kind: type[torch.optim.Optimizer],
    sizes: Sequence[int],
    dtype: torch.dtype,
    **options: bool,
) -> Tensor:
    """The same elements after five steps, split into parameters of these sizes; the last one has
    the rest."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ELEMENTS, generator=generator).to(dtype)
    cut = [*sizes, ELEMENTS - sum(sizes)]
    params = [nn.Parameter(part.clone()) for part in start.split(cut)]
    optimizer = kind(params, **SETTINGS, **options)  # type: ignore[call-arg]
    for step in range(5):
        optimizer.param_groups[0]["lr"] = SETTINGS["lr"] * (step + 1) / 7
        gradient = torch.randn(ELEMENTS, generator=generator).to(dtype)
        for param, part in zip(params, gradient.split(cut), strict=True):
            param.grad = part
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_tensor_splits_or_threads(dtype: torch.dtype) -> None:
    """Oracle: one tensor of all elements; PyTorch's own fused step is equal up to its last
    vector."""
    whole = train_parts(FusedAdamW, [], dtype, fused=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for sizes in (
                [0],
                [1] * 50,
                [3] * 50,
                [VECTOR_ELEMENTS],
                [65, 127, 1000],
                [10_001],
            ):
                assert torch.equal(
                    train_parts(FusedAdamW, sizes, dtype, fused=True), whole
                )
    finally:
        torch.set_num_threads(before)
    pytorchs = train_parts(torch.optim.AdamW, [], dtype, fused=True)
    vectors = ELEMENTS // VECTOR_ELEMENTS * VECTOR_ELEMENTS
    assert torch.equal(pytorchs[:vectors], whole[:vectors])


def test_parameters_without_a_gradient_are_unchanged() -> None:
    """Oracle: the values before, and no states; a closure's value is returned."""
    params = [nn.Parameter(torch.ones(size)) for size in (70, 5)]
    optimizer = FusedAdamW(params, fused=True)
    params[0].grad = torch.ones(70)
    assert optimizer.step(lambda: 4.0) == 4.0
    assert list(optimizer.state) == params[:1] and torch.equal(
        params[1].detach(), torch.ones(5)
    )
