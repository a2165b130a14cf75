"""State as tensors: every strategy saves and loads the same state, and a resumed run equals an uninterrupted one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import MemoryConfig
from fsdptoys.memory.config import OffloadStateDType
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    MuonConfig,
    OptimConfig,
    OptimStateDType,
    SGDConfig,
    WeightDecayOn,
)
from fsdptoys.optim.config import set_schedule
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    full_tensors,
    host_copy,
)
from fsdptoys.parallel.fsdp import TORCH, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.parallel.state import State
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import (
    local_bounds,
)
from scripts.parity import Outcome
from scripts.ranks import run_ranks
from tests.memory.offloaded import OVERLAPPED, outcome, take_steps, trainer
from tests.parallel.runs import TINY, WITH_BLOCKS, make_config, tiny_model

MIDDLE, STEPS = 2, 4

STRATEGIES: dict[str, tuple[ParallelConfig, int]] = {
    "ddp": (DDPConfig(), -1),
    "fsdp1": (FSDP1Config(), -1),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), -1),
    "fsdp1 parts": (FSDP1Config(wrap=Wrap.block_attn_mlp), -1),
    "fsdp2": (FSDP2Config(), -1),
    "hsdp1": (FSDP1Config(), 2),
    "hsdp1 flat": (FSDP1Config(use_orig_params=False), 2),
    "hsdp2": (FSDP2Config(), 2),
}
MODELS = {
    "llama": replace(tiny_model(), n_layers=2),
    "tied": replace(tiny_model(tie_embeddings=True), n_layers=2),
    # FSDP2 shards its experts along another dim than the first.
    "qwen3_moe": TINY["qwen3_moe"],
    "gpt2": TINY["gpt2"],
}


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    return make_config(parallel, ranks, **{"steps": STEPS, "seq_len": 8, "batch_size": 1, "grad_accum": 1, **options})


def strategies_on(ranks: int) -> list[str]:
    left_out = [name for name in STRATEGIES if name.startswith("hsdp") and ranks < 4]
    left_out += ["hsdp2"] if TORCH < (2, 8) else []  # which HSDP needs under FSDP2 on a CPU
    return [name for name in STRATEGIES if name not in left_out]


@dataclass
class Saved:
    """A run saved in its middle, and its final results."""

    tensors: dict[str, numpy.ndarray]
    batches: dict[str, Any]
    end: Outcome
    end_tensors: dict[str, numpy.ndarray]


def in_full(made: Trainer) -> dict[str, numpy.ndarray]:
    """The state in full, on rank 0."""
    tensors = made.strategy.state_tensors(made.optimizer)
    # NumPy has no bfloat16, which is exact in float32.
    exact = {torch.bfloat16: torch.float32}
    named = {
        name: whole.to(exact.get(whole.dtype, whole.dtype)).numpy().copy()
        for name, whole in full_tensors(tensors)
        if whole is not None
    }
    assert bool(named) == (dist.get_rank() == 0)
    return named


def run_saved(configs: list[Config]) -> list[Saved]:
    """Runs with a copy of their state in the middle."""
    saved = []
    for each in configs:
        made = trainer(each, None)
        take_steps(made, 1, MIDDLE)
        middle = in_full(made), made.batches.state_dict()
        take_steps(made, MIDDLE + 1, each.train.steps)
        saved.append(Saved(*middle, outcome(made), in_full(made)))
    return saved


def filler(saved: dict[str, numpy.ndarray]) -> Callable[[dict[str, Tensor]], None]:
    """Fills tensors by the bounds of a rank's shards."""

    def fill(tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == saved.keys()
        for name, tensor in tensors.items():
            region = tuple(slice(*bounds) for bounds in local_bounds(tensor))
            assert tensor.shape == saved[name].shape
            local(tensor).copy_(torch.from_numpy(saved[name])[region])

    return fill


def differing(got: dict[str, numpy.ndarray], expected: dict[str, numpy.ndarray]) -> list[str]:
    """Names under which two states differ in a bit."""
    names = {name for name in got.keys() & expected.keys() if got[name].tobytes() != expected[name].tobytes()}
    return sorted(names | got.keys() ^ expected.keys())


def resume_rows(rows: list[tuple[Config, Saved, bool]]) -> list[dict[str, Any]]:
    """Load into a trainer, possibly after some steps, and take the second half of the steps."""
    results = []
    for each, saved, used in rows:
        made = trainer(each, None)
        if used:
            take_steps(made, 1, 1)
            made.history.clear()
        made.strategy.load_state_tensors(made.optimizer, filler(saved.tensors))
        set_schedule(made.schedule, MIDDLE)
        made.batches.load_state_dict(saved.batches)
        loaded = differing(in_full(made), saved.tensors)
        take_steps(made, MIDDLE + 1, each.train.steps)
        end, losses = outcome(made), saved.end.losses[MIDDLE:]
        same = end.losses == losses and end.parameters == saved.end.parameters
        results.append({"loaded": loaded, "same": same, "end": differing(in_full(made), saved.end_tensors)})
    return results


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_resumes_from_the_state_of_one_process_bitwise(ranks: int) -> None:
    """Oracle: one uninterrupted process; states too, read back right after loading and at the end; tied, experts.

    On many ranks a single step is enough: the other tests here and those of resuming take more.
    """
    last = MIDDLE + 1 if ranks == 4 else STEPS
    names = ["llama", "gpt2"] if ranks == 2 else ["tied", "qwen3_moe"]
    single = SingleConfig(simulated_ranks=ranks)
    saved = run_ranks(1, run_saved, [config(single, 1, model=MODELS[name], steps=last) for name in names])[0]
    rows = {}
    for model, state in zip(names, saved, strict=True):
        # Only their experts are special, and many ranks are slow.
        of_experts = ["fsdp1 flat", "fsdp2", "hsdp2"] if model == "qwen3_moe" else STRATEGIES
        for name in strategies_on(ranks):
            if name not in of_experts:
                continue
            parallel, fsdp_size = STRATEGIES[name]
            rows[model, name] = (
                config(parallel, ranks, fsdp_size=fsdp_size, model=MODELS[model], steps=last),
                state,
                model == "tied",
            )
    results = run_ranks(ranks, resume_rows, list(rows.values()))[0]
    wrong = {key: result for key, result in zip(rows, results, strict=True) if any(result["loaded"] + result["end"])}
    assert wrong == {}
    assert [key for key, result in zip(rows, results, strict=True) if not result["same"]] == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "optim",
    [
        MuonConfig(lr=1e-2),
        *(
            AdamWConfig(lr=1e-2, state_dtype=kept, weight_decay_on=WeightDecayOn.all)
            for kept in (OptimStateDType.bfloat16, OptimStateDType.int8, OptimStateDType.int4)
        ),
    ],
    ids=["muon", "states of bfloat16", "states of int8", "states of int4"],
)
def test_other_optimizers_resume_on_another_number_of_ranks_bitwise(optim: OptimConfig, ranks: int) -> None:
    """Oracle: one uninterrupted process; states too, read back right after loading and at the end; with experts."""
    few_bits = optim.low_bit_format is not None
    options: dict[str, Any] = {"model": (WITH_BLOCKS if few_bits else MODELS)["qwen3_moe"], "optim": optim}
    (saved,) = run_ranks(1, run_saved, [config(SingleConfig(simulated_ranks=ranks), 1, **options)])[0]
    names = ["ddp", "fsdp2", *(["hsdp2"] if ranks == 4 else [])] + (
        [] if optim.name == "muon" or few_bits else ["fsdp1"]
    )
    rows = []
    for name in names:
        if name in strategies_on(ranks):
            parallel, fsdp_size = STRATEGIES[name]
            rows.append((config(parallel, ranks, fsdp_size=fsdp_size, **options), saved, True))
    results = run_ranks(ranks, resume_rows, rows)[0]
    assert results == [{"loaded": [], "same": True, "end": []}] * len(rows)


@dataclass
class Row:
    """An interrupted run."""

    config: Config
    how: str | None = None
    offload: dict[str, Any] = field(default_factory=dict)


def rows_on_two_ranks() -> dict[str, Row]:
    def row(
        parallel: ParallelConfig, how: str | None = None, offload: dict[str, Any] | None = None, **more: Any
    ) -> Row:
        return Row(config(parallel, 2, **{"model": replace(MODELS["llama"], n_layers=1), **more}), how, offload or {})

    bf16, half = {"param_dtype": DType.bfloat16}, {"offload_state_dtype": OffloadStateDType.bfloat16}
    sgd = {"optim": SGDConfig(lr=0.1, weight_decay_on=WeightDecayOn.all)}
    flat = FSDP1Config(use_orig_params=False)
    offloaded = {"memory": MemoryConfig(cpu_offload=True)}
    rows = {
        "bf16 fsdp1": row(FSDP1Config(**bf16), model=MODELS["tied"], grad_accum=2),
        "bf16 fsdp2": row(FSDP2Config(**bf16), model=MODELS["tied"], grad_accum=2),
        "native": row(FSDP2Config(**bf16), **offloaded),
        "overlapped": row(FSDP2Config(**bf16), OVERLAPPED, **offloaded),
        "lazy ddp": row(DDPConfig(), "lazy"),
        "pipelined flat": row(flat, "pipelined", half),
        "pipelined half": row(FSDP1Config(), "pipelined", half),
        "lazy fsdp2": row(FSDP2Config(), "lazy", half, grad_accum=2),
        "lazy sgd": row(FSDP2Config(), "lazy", **sgd),
    }
    for name, parallel in {"fsdp1": FSDP1Config(), "flat": flat, "fsdp2": FSDP2Config()}.items():
        rows[f"sgd {name}"] = row(parallel, **sgd)
        implementation = Implementation.foreach if name == "flat" else Implementation.fused
        adamw = AdamWConfig(lr=1e-2, implementation=implementation, weight_decay_on=WeightDecayOn.all)
        rows[f"{implementation.value} {name}"] = row(parallel, optim=adamw, deterministic=False)
    for name, parallel in {"flat": flat, "fsdp2": FSDP2Config()}.items():
        optim = SGDConfig(lr=0.1, momentum=0.0, weight_decay_on=WeightDecayOn.all)
        rows[f"no momentum {name}"] = row(parallel, optim=optim)
    return rows


def interrupt(rows: list[Row], folder: Path) -> list[list[Outcome]]:
    """For each row: a run, the same run copied in its middle, and one resumed from the copies."""
    outcomes = []
    for number, row in enumerate(rows):
        undisturbed, copied, resumed = (trainer(row.config, row.how, **row.offload) for _ in range(3))
        take_steps(undisturbed, 1, STEPS)
        take_steps(copied, 1, 1)
        copies = host_copy(copied.strategy.state_tensors(copied.optimizer))
        addresses = {name: address(copy) for name, copy in copies.items()}
        take_steps(copied, 2, MIDDLE)
        forward_only(copied)
        copies = host_copy(copied.strategy.state_tensors(copied.optimizer), into=copies)
        assert {name: address(copy) for name, copy in copies.items()} == addresses
        batches = copied.batches.state_dict()
        take_steps(copied, MIDDLE + 1, STEPS)  # must not change the copies
        where = folder / str(number)
        dcp.save(copies, checkpoint_id=where)
        take_steps(resumed, 1, 1)  # loading must replace everything
        resumed.strategy.load_state_tensors(resumed.optimizer, functools.partial(load_unseen, where))
        set_schedule(resumed.schedule, MIDDLE)
        resumed.batches.load_state_dict(batches)
        resumed.history = copied.history[:MIDDLE]
        take_steps(resumed, MIDDLE + 1, STEPS)
        outcomes.append([outcome(undisturbed), outcome(copied), outcome(resumed)])
    return outcomes


def forward_only(made: Trainer) -> None:
    """As an evaluation: FSDP2 leaves units gathered that only a backward would free."""
    tokens_BT = torch.arange(16).view(2, 8)
    with torch.no_grad():
        made.strategy.model(tokens_BT, tokens_BT, made.loss_fn)


def load_unseen(where: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors without increasing their version counters, like a file read directly into their memory."""
    read = host_copy(tensors)
    dcp.load(read, checkpoint_id=where)
    for name, tensor in tensors.items():
        local(tensor).data.copy_(local(read[name]))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


def test_optimizers_and_offloads_resume_bitwise(tmp_path: Path) -> None:
    """Oracle: the uninterrupted run; through torch's distributed checkpoint, from copies on the host."""
    rows = rows_on_two_ranks()
    outcomes = dict(zip(rows, run_ranks(2, interrupt, list(rows.values()), tmp_path)[0], strict=True))
    assert [name for name, (run, copied, _) in outcomes.items() if copied != run] == []
    assert [name for name, (run, _, resumed) in outcomes.items() if resumed != run] == []


@pytest.mark.parametrize("kept", ["adamw", "adamw fused", "sgd", "sgd without momentum"])
def test_saving_an_optimizer_before_its_first_step_does_not_change_that_step(kept: str) -> None:
    """Oracle: an unsaved optimizer; bits, since 0.0 + -0.0 is not -0.0; the keys equal those after a
    step.
    """

    def make() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        params = [
            {"params": [param], "weight_decay": decay}
            for param, decay in zip(model.parameters(), (0.1, 0.0), strict=True)
        ]
        if kept.startswith("sgd"):
            return model, torch.optim.SGD(params, lr=0.1, momentum=0.9 if kept == "sgd" else 0.0)
        return model, torch.optim.AdamW(params, lr=0.1, fused="fused" in kept or None)

    def step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, numpy.ndarray]:
        for param in model.parameters():
            param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
            param.grad.view(-1)[0] = -0.0
        optimizer.step()
        tensors = State(model.named_parameters, optimizer).tensors()
        return {name: tensor.numpy().copy() for name, tensor in tensors.items()}

    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = State(model.named_parameters, optimizer).tensors()
    assert all(torch.equal(first[f"model.{name}"], value) for name, value in before.items())
    assert not any(tensor.any() for name, tensor in first.items() if name.startswith("optim."))
    keys = set(first)
    got, expected = step(model, optimizer), step(*make())
    assert keys == set(expected)
    assert differing(got, expected) == []
