"""State as tensors: every strategy saves and loads the same state, and a resumed run equals an
uninterrupted one."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import (
    AdamWConfig,
    MuonConfig,
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
    ToyDDPConfig,
    ToyEPConfig,
    ToyFSDPConfig,
    ToyZero1Config,
    ToyZero2Config,
    ToyZero3Config,
    full_tensors,
    host_copy,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from tests.harness.offloaded_runs import OVERLAPPED, build_trainer, outcome, take_steps
from tests.harness.outcomes import Outcome
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import levels, selected, train_runs
from tests.harness.tiny import (
    EXPERTS,
    TINY,
    WITH_BLOCKS,
    make_config,
    supported,
    tiny_model,
    with_sizes,
)

MIDDLE = 2
STEPS = 4

FLAT = FSDP1Config(use_orig_params=False)
STRATEGIES: dict[str, tuple[ParallelConfig, dict[str, int]]] = {
    "ddp": (DDPConfig(), {}),
    "fsdp1": (FSDP1Config(), {}),
    "fsdp1 flat": (FLAT, {}),
    "fsdp1 parts": (FSDP1Config(wrap=Wrap.block_attn_mlp), {}),
    "fsdp2": (FSDP2Config(), {}),
    "hsdp1": (FSDP1Config(), {"fsdp_size": 2}),
    "hsdp1 flat": (FLAT, {"fsdp_size": 2}),
    "hsdp2": (FSDP2Config(), {"fsdp_size": 2}),
}
MODELS = {
    "llama": replace(tiny_model(), n_layers=2),
    "tied": replace(tiny_model(tie_embeddings=True), n_layers=2),
    # FSDP2 shards its experts along another dim than the first.
    "qwen3_moe": TINY["qwen3_moe"],
    "gpt2": TINY["gpt2"],
}


def config(parallel: ParallelConfig, ranks: int, **options: Any) -> Config:
    return make_config(
        parallel,
        ranks,
        **{"steps": STEPS, "seq_len": 8, "batch_size": 1, "grad_accum": 1, **options},
    )


@dataclass
class Saved:
    """A run saved in its middle, and its final results."""

    tensors: dict[str, numpy.ndarray]
    batches: dict[str, Any]
    end: Outcome
    end_tensors: dict[str, numpy.ndarray]


def in_full(run: Trainer) -> dict[str, numpy.ndarray]:
    """The state in full, on rank 0, by way of reused copies on the host."""
    tensors = run.strategy.state_tensors(run.optimizer)
    copies = host_copy(tensors)
    addresses = {name: local_tensor(copy).data_ptr() for name, copy in copies.items()}
    copies = host_copy(tensors, into=copies)
    assert addresses == {
        name: local_tensor(copy).data_ptr() for name, copy in copies.items()
    }
    # NumPy has no bfloat16, which is exact in float32.
    exact = {torch.bfloat16: torch.float32}
    arrays = {
        name: whole.to(exact.get(whole.dtype, whole.dtype)).numpy().copy()
        for name, whole in full_tensors(copies)
        if whole is not None
    }
    assert bool(arrays) == (dist.get_rank() == 0)
    return arrays


def run_saved(configs: list[Config]) -> list[Saved]:
    """Runs with a copy of their state in the middle."""
    saved = []
    for config in configs:
        run = build_trainer(config, None)
        take_steps(run, 1, MIDDLE)
        middle = in_full(run), run.data.batches.state_dict()
        take_steps(run, MIDDLE + 1, config.train.steps)
        saved.append(Saved(*middle, outcome(run), in_full(run)))
    return saved


def filler(saved: dict[str, numpy.ndarray]) -> Callable[[dict[str, Tensor]], None]:
    """Fills tensors by the bounds of a rank's shards, without increasing their version counters,
    like a file read directly into their memory."""

    def fill(tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == saved.keys()
        for name, tensor in tensors.items():
            region = tuple(slice(*bounds) for bounds in local_bounds(tensor))
            assert tensor.shape == saved[name].shape
            local_tensor(tensor).data.copy_(torch.from_numpy(saved[name])[region])

    return fill


def differing(
    state: dict[str, numpy.ndarray], expected: dict[str, numpy.ndarray]
) -> list[str]:
    """Names under which two states differ in a bit."""
    names = {
        name
        for name in state.keys() & expected.keys()
        if state[name].tobytes() != expected[name].tobytes()
    }
    return sorted(names | state.keys() ^ expected.keys())


def forward_only(run: Trainer) -> None:
    """As an evaluation: FSDP2 leaves units gathered that only a backward would free."""
    tokens_BT = torch.arange(16).view(2, 8)
    with torch.no_grad():
        run.strategy.model(tokens_BT, tokens_BT, run.scale.loss_fn)


@dataclass
class Loading:
    """A run that resumes from the state of one process."""

    parallel: ParallelConfig
    ranks: int
    options: dict[str, Any]
    """Settings of the one process too."""
    layout: dict[str, Any] = field(default_factory=dict)
    how: str | None = None
    """Its offload, see ``offloaded_runs.build_trainer``."""
    used: bool = True
    """Whether the trainer has taken a step before."""
    exact: bool = True
    """Whether it trains with the bits of one process."""

    def configs(self) -> tuple[Config, Config]:
        """Return the run, and the one process."""
        single = SingleConfig(
            simulated_ranks=self.ranks, param_dtype=self.parallel.param_dtype
        )
        run = config(self.parallel, self.ranks, **self.options, **self.layout)
        return run, config(single, 1, **self.options)


def resume_rows(rows: list[tuple[Loading, Saved]]) -> list[dict[str, Any]]:
    """Load into a trainer, possibly after some steps, and take the second half of the steps."""
    results = []
    for loading, saved in rows:
        run, _ = loading.configs()
        resumed = build_trainer(run, loading.how)
        if loading.used:
            take_steps(resumed, 1, 1)
            resumed.history.clear()
            forward_only(resumed)
        resumed.strategy.load_state_tensors(resumed.optimizer, filler(saved.tensors))
        set_schedule(resumed.schedule, MIDDLE)
        resumed.data.batches.load_state_dict(saved.batches)
        loaded = differing(in_full(resumed), saved.tensors)
        take_steps(resumed, MIDDLE + 1, run.train.steps)
        end = outcome(resumed)
        same = (
            end.losses == saved.end.losses[MIDDLE:]
            and end.parameters == saved.end.parameters
        )
        last = differing(in_full(resumed), saved.end_tensors)
        exact = (
            {"same": same, "end": last} if loading.exact else {"same": True, "end": []}
        )
        results.append({"loaded": loaded, **exact})
    return results


def loadings() -> dict[str, Loading]:
    """Return strategies, models, optimizers and offloads on several numbers of ranks; on four a
    single step is enough."""
    rows: dict[str, Loading] = {}
    for ranks in (1, 2, 4):
        strategies = [
            name for name in STRATEGIES if ranks == 4 or not name.startswith("hsdp")
        ]
        for model in ("llama", "gpt2") if ranks == 2 else ("tied", "qwen3_moe"):
            options = {
                "model": MODELS[model],
                "steps": MIDDLE + 1 if ranks == 4 else STEPS,
            }
            # Only their experts are special, and many ranks are slow.
            of_experts = ("fsdp1 flat", "fsdp2", "hsdp2")
            for name in of_experts if model == "qwen3_moe" else strategies:
                if name in strategies:
                    parallel, layout = STRATEGIES[name]
                    rows[f"{name} {model} on {ranks}"] = Loading(
                        parallel, ranks, options, layout, used=model == "tied"
                    )
    for ranks in (2, 4):
        for kind in ("muon", "bfloat16", "int8", "int4"):
            few_bits = kind.startswith("int")
            options = {
                "model": (WITH_BLOCKS if few_bits else MODELS)["qwen3_moe"],
                "optim": MuonConfig(lr=1e-2),
            }
            if kind != "muon":
                state_dtype = OptimStateDType(kind)
                options["optim"] = AdamWConfig(
                    lr=1e-2, state_dtype=state_dtype, weight_decay_on=WeightDecayOn.all
                )
            names = [
                "ddp",
                "fsdp2",
                *(["hsdp2"] if ranks == 4 else []),
                *(["fsdp1"] if kind == "bfloat16" else []),
            ]
            for name in names:
                parallel, layout = STRATEGIES[name]
                rows[f"{name} {kind} on {ranks}"] = Loading(
                    parallel, ranks, options, layout
                )
    tied = {"model": MODELS["tied"]}
    for toy in (
        ToyDDPConfig,
        ToyZero1Config,
        ToyZero2Config,
        ToyZero3Config,
        ToyFSDPConfig,
    ):
        rows[toy.name] = Loading(toy(), 2, tied)
    for name, optim in {"adamw": AdamWConfig(), "muon": MuonConfig()}.items():
        experts = {"model": with_sizes(TINY["qwen3_moe"], **EXPERTS), "optim": optim}
        for label, ranks, layout in (
            ("on 2", 2, {"ep_size": 2}),
            ("on 4", 4, {"ep_size": 2}),
            ("one a rank", 4, {"ep_size": 4}),
            ("hsdp2", 4, {"ep_size": 2, "fsdp_size": 2}),
        ):
            rows[f"split experts {name} {label}"] = Loading(
                FSDP2Config(), ranks, experts, layout, exact=False
            )
        if name == "adamw":  # the toy refuses Muon
            rows["toy_ep"] = Loading(
                ToyEPConfig(), 2, experts, {"ep_size": 2}, exact=False
            )
    small = {"model": replace(MODELS["llama"], n_layers=1)}
    sgd = {"optim": SGDConfig(lr=0.1, weight_decay_on=WeightDecayOn.all), **small}
    still = SGDConfig(lr=0.1, momentum=0.0, weight_decay_on=WeightDecayOn.all)
    bf16 = FSDP2Config(param_dtype=DType.bfloat16)
    on_host = {"memory": MemoryConfig(cpu_offload=True)}
    rows |= {
        "lazy ddp": Loading(DDPConfig(), 2, small, how="lazy"),
        "pipelined flat": Loading(FLAT, 2, small, how="pipelined"),
        "lazy fsdp2": Loading(FSDP2Config(), 2, {**small, "grad_accum": 2}, how="lazy"),
        "lazy sgd": Loading(FSDP2Config(), 2, sgd, how="lazy"),
        "on the host": Loading(bf16, 2, small, on_host),
        "overlapped": Loading(bf16, 2, small, on_host, OVERLAPPED),
    }
    for name in ("fsdp1", "fsdp1 flat", "fsdp2"):
        parallel, _ = STRATEGIES[name]
        rows[f"{name} sgd"] = Loading(parallel, 2, sgd)
        rows[f"{name} without momentum"] = Loading(parallel, 2, {**sgd, "optim": still})
    return supported(rows)


LOADINGS = loadings()
LOADED = {
    *("fsdp1 llama on 2", "fsdp1 parts gpt2 on 2", "fsdp2 llama on 2", "ddp gpt2 on 2"),
    *(
        "fsdp1 flat llama on 2",
        "fsdp2 tied on 1",
        "hsdp2 qwen3_moe on 4",
        "fsdp2 muon on 2",
    ),
    *("fsdp1 bfloat16 on 2", "fsdp2 int8 on 2", "lazy ddp", "lazy sgd", "lazy fsdp2"),
    *("split experts adamw on 2", "split experts adamw hsdp2", "toy_ep"),
    *("toy_ddp", "toy_zero1", "toy_zero2", "toy_zero3", "toy_fsdp"),
    *("pipelined flat", "overlapped", "fsdp1 flat sgd", "fsdp2 without momentum"),
}


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Save one process for each model and optimizer, and resume the selected rows from it."""
    rows = {name: LOADINGS[name] for name in selected(request, "loading")}
    states = train_runs([(1, row.configs()[1]) for row in rows.values()], run_saved)
    results: dict[str, dict[str, Any]] = {}
    for world_size in {row.ranks for row in rows.values()}:
        group = {
            label: (row, state)
            for (label, row), state in zip(rows.items(), states, strict=True)
            if row.ranks == world_size
        }
        results |= zip(
            group,
            run_ranks(world_size, resume_rows, list(group.values()))[0],
            strict=True,
        )
    return results


@pytest.mark.parametrize("loading", levels(LOADINGS, LOADED & LOADINGS.keys()))
def test_every_strategy_resumes_from_the_state_of_one_process_bitwise(
    loading: str, loaded: dict[str, dict[str, Any]]
) -> None:
    """Oracle: one uninterrupted process; states too, read back right after loading and at the end;
    tied, experts."""
    assert loaded[loading] == {"loaded": [], "same": True, "end": []}
