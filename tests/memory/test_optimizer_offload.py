"""Optimizer offload and overlapped CPU offload: no schedule changes a bit, under any strategy.

``test_state.py`` resumes such runs.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig, cpu_offload
from fsdptoys.memory.bucketed_optimizer import BucketedOptimizer
from fsdptoys.memory.config import OffloadSchedule, OffloadStateDType
from fsdptoys.memory.cpu_offload import Workers, overlap_cpu_offload, threads_per_rank
from fsdptoys.memory.optimizer_stepper import cpu_threads
from fsdptoys.optim import AdamWConfig, Implementation, SGDConfig, WeightDecayOn
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    ToyFSDPConfig,
)
from fsdptoys.parallel.cpu_offload_cast import Mirror, mirror_parameters
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.parallel.fsdp2_internals import gathering_stream
from fsdptoys.parallel.precision import DType
from tests.harness.offloaded_runs import (
    OVERLAPPED,
    build_trainer,
    offloaded,
    take_steps,
    train_all,
)
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pair, Pairs, levels, trained_rows
from tests.harness.tiny import TINY, WRAPS, make_config, supported, tiny_model

SERIAL = "serial"
PIPELINED = "pipelined"
LAZY = "lazy"
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
BFLOAT16 = {"offload_state_dtype": OffloadStateDType.bfloat16}

SMALL = replace(tiny_model(), n_layers=2)

FSDP2_ALONE = FSDP2Config()
STRATEGIES: dict[str, tuple[ParallelConfig, int, int]] = {
    "single": (SingleConfig(), 1, -1),
    "ddp": (DDPConfig(), 2, -1),
    "fsdp1": (FSDP1Config(), 2, -1),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), 2, -1),
    "fsdp2": (FSDP2_ALONE, 2, -1),
    "hsdp2": (FSDP2Config(), 4, 2),
}


def schedules(parallel: ParallelConfig) -> list[str]:
    return [SERIAL, PIPELINED, *([LAZY] if parallel.capabilities.lazy_updates else [])]


def strategies() -> dict[str, Pair]:
    """Return every schedule under every strategy, over some steps with clipping, a cosine, two
    micro-batches."""
    rows = {}
    for name, (parallel, ranks, fsdp_size) in STRATEGIES.items():
        options: dict[str, Any] = {
            "fsdp_size": fsdp_size,
            "seq_len": 8,
            "batch_size": 1,
            "model": SMALL,
        }
        for mode, steps in (("deterministic", 3), ("default", 5 if ranks < 4 else 3)):
            config = make_config(
                parallel,
                ranks,
                deterministic=mode == "deterministic",
                steps=steps,
                **options,
            )
            rows |= {
                f"{name} {how}, {mode}": offloaded(ranks, config, how)
                for how in schedules(parallel)
            }
    return rows


def settings() -> dict[str, Pair]:
    """Return settings that interact with hooks or buckets; any two of wrapping, resharding,
    prefetching meet."""

    def row(
        parallel: ParallelConfig, how: str = LAZY, fraction: float = 1.0, **options: Any
    ) -> Pair:
        config = make_config(
            parallel, 2, steps=3, seq_len=8, batch_size=1, **{"model": SMALL, **options}
        )
        return offloaded(
            2, config, how, **({} if fraction == 1 else {"offload_fraction": fraction})
        )

    bf16: dict[str, Any] = {"param_dtype": DType.bfloat16}
    tied = tiny_model(tie_embeddings=True)
    rows: dict[str, Pair] = {}
    for (first, (label, wrap)), (second, reshard) in product(
        enumerate(WRAPS.items()), enumerate(ReshardAfterForward)
    ):
        ahead = (0, 2)[(first + second) % 2]
        parallel = FSDP2Config(
            reshard_after_forward=reshard, forward_prefetch=ahead, **wrap, **bf16
        )
        rows[f"{label} {reshard.value} {ahead}"] = row(parallel, memory=CHECKPOINTED)
    rows["ddp tied"] = row(DDPConfig(**bf16), model=tied)
    rows["fsdp2 tied"] = row(FSDP2Config(**bf16), model=tied)
    rows["ddp checkpointing"] = row(DDPConfig(), memory=CHECKPOINTED)
    for how in (PIPELINED, LAZY):
        rows |= {f"{share} {how}": row(FSDP2_ALONE, how, share) for share in (0.1, 0.5)}
        rows[f"no clipping {how}"] = row(FSDP2_ALONE, how, max_grad_norm=None)
        for nesterov in (False, True):
            sgd = SGDConfig(
                lr=0.1, nesterov=nesterov, weight_decay_on=WeightDecayOn.all
            )
            rows[f"sgd nesterov={nesterov} {how}"] = row(FSDP2_ALONE, how, optim=sgd)
    rows |= {
        family: row(FSDP2_ALONE, model=TINY[family]) for family in ("qwen3_moe", "gpt2")
    }
    rows["ddp gpt2"] = row(DDPConfig(), model=TINY["gpt2"])
    rows["toy_fsdp size"] = row(ToyFSDPConfig(min_params=1500), model=tied)
    for implementation in Implementation:
        adamw = AdamWConfig(lr=1e-2, implementation=implementation)
        rows[implementation.value] = row(FSDP2_ALONE, optim=adamw, deterministic=False)
    return rows


def cpu_config(dtype: DType = DType.bfloat16, ranks: int = 2, **options: Any) -> Config:
    parallel = FSDP2Config(param_dtype=dtype, **options.pop("parallel", {}))
    settings = {"model": SMALL, "steps": 4, "seq_len": 8, "batch_size": 1, **options}
    return make_config(
        parallel, ranks, memory=MemoryConfig(cpu_offload=True), **settings
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "20 steps": {"steps": 20, "deterministic": False},
    "deterministic": {},
    "no clipping": {"max_grad_norm": None},
    "one micro-batch": {"grad_accum": 1},
    "parts, prefetch": {
        "parallel": {"wrap": Wrap.block_attn_mlp, "forward_prefetch": 2}
    },
    "never resharded": {
        "parallel": {"reshard_after_forward": ReshardAfterForward.never}
    },
    "tied": {"model": tiny_model(tie_embeddings=True)},
    "sgd": {"optim": SGDConfig(lr=0.1, weight_decay_on=WeightDecayOn.all)},
    "experts": {"model": TINY["qwen3_moe"]},
    "positions": {"model": TINY["gpt2"]},
    "fused": {
        "optim": AdamWConfig(lr=1e-2, implementation=Implementation.fused),
        "deterministic": False,
    },
    "foreach": {
        "optim": AdamWConfig(lr=1e-2, implementation=Implementation.foreach),
        "deterministic": False,
    },
}
"""Settings that interact with the hooks, the threads or the mirror; without a mirror fewer are
needed."""


def overlapped() -> dict[str, Pair]:
    """Return the overlapped CPU offload in all ``VARIANTS``, and PyTorch's own."""
    rows = {
        f"overlapped, {name} {dtype.value}": offloaded(
            2, cpu_config(dtype, **{"steps": 3, **options}), OVERLAPPED
        )
        for dtype, (name, options) in product(DType, VARIANTS.items())
        if dtype is DType.bfloat16
        or name in ("deterministic", "parts, prefetch", "fused")
    }
    return rows | {
        "overlapped, hsdp2": offloaded(
            4, cpu_config(ranks=4, fsdp_size=2, steps=3), OVERLAPPED
        )
    }


ROWS = supported(strategies() | settings() | overlapped())
SHORT = {
    *(
        "single lazy, deterministic",
        "ddp pipelined, default",
        "fsdp1 serial, default",
        "fsdp1 flat pipelined, default",
    ),
    *(
        "fsdp2 lazy, default",
        "parts always 0",
        "classes never 0",
        "ddp tied",
        "0.5 pipelined",
        "0.1 lazy",
    ),
    *("ddp gpt2", "toy_fsdp size"),
    *("sgd nesterov=True lazy", "sgd nesterov=False pipelined", "qwen3_moe", "fused"),
    *(
        f"overlapped, {name} bfloat16"
        for name in ("deterministic", "parts, prefetch", "tied", "sgd", "experts")
    ),
    *("overlapped, fused float16", "overlapped, parts, prefetch float32"),
}
trained = trained_rows(ROWS, train_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_every_schedule_and_setting_matches_no_offload_bitwise(
    row: str, trained: Pairs
) -> None:
    """Oracle: the plain optimizer under the same strategy and model; for overlapped CPU offload,
    CPUOffloadPolicy."""
    outcome, plain = trained[row]
    assert outcome == plain


@pytest.mark.usefixtures("unmeasured")
def test_bfloat16_states_are_close_to_float32_and_independent_of_the_schedule() -> None:
    """Oracle: float32 states to 1%."""
    config = make_config(
        FSDP2_ALONE, 2, steps=10, seq_len=8, model=SMALL, deterministic=False
    )
    rows = [(config, None, {}), (config, LAZY, BFLOAT16), (config, PIPELINED, BFLOAT16)]
    plain, lazy, pipelined = run_ranks(2, train_all, rows)[0]
    assert lazy == pipelined
    assert lazy.parameters != plain.parameters
    assert lazy.losses == pytest.approx(plain.losses, rel=1e-2)


def test_auto_schedule_holds_no_gradients_between_steps() -> None:
    """Oracle: ``pipelined``."""
    config = make_config(FSDP2_ALONE, 2, memory=MemoryConfig(optimizer_offload=True))
    assert config.memory.offload_schedule is OffloadSchedule.pipelined


def gathered_events(config: Config) -> tuple[int, list[int], bool]:
    """Number of units, and which of them waited for an event in the forward after a lazy step."""
    run = build_trainer(config, LAZY)
    assert isinstance(run.strategy, FSDP2)
    modules = [module for module, _ in run.strategy.units()]
    waited: list[int] = []
    take_steps(run, 1, 1)
    assert isinstance(run.optimizer, BucketedOptimizer)
    run.optimizer._gather_after = lambda module, event: waited.append(
        modules.index(module)
    )
    run.optimizer.executor._transfers.mark = object  # type: ignore[attr-defined]
    take_steps(run, 2, 2)
    take_steps(run, 3, 3)
    return (
        len(modules),
        waited,
        all(gathering_stream(module) is not None for module in modules),
    )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ahead", [0, 2])
def test_every_gather_of_fsdp2_waits_for_the_optimizer_step_of_its_parameters(
    ahead: int,
) -> None:
    """Oracle: unit i gathers up to unit i + ahead, so the last ones find nothing new to wait
    for."""
    config = make_config(FSDP2Config(forward_prefetch=ahead), 2, steps=3, grad_accum=1)
    count, waited, stream_found = run_ranks(2, gathered_events, config)[0]
    assert waited == [*range(count - ahead)] * 2
    assert stream_found


def parameters_that_travel(config: Config) -> list[tuple[bool, torch.dtype]]:
    """Whether FSDP2 uploads the mirror of each parameter, and its dtype."""
    run = build_trainer(config, OVERLAPPED)
    assert isinstance(run.optimizer, BucketedOptimizer)
    take_steps(run, 1, 2)
    mirror: Mirror = run.optimizer.executor._on_updated.__self__  # type: ignore[attr-defined]
    entries = [entry for unit in mirror._entries for entry in unit]
    return [
        (entry.fsdp_param._sharded_param_data is entry.mirror, entry.mirror.dtype)
        for entry in entries
    ]


def test_parameters_travel_in_the_dtype_of_the_forward() -> None:
    """Oracle: the tensors that FSDP2 uploads; their bits are compared above."""
    uploads = run_ranks(2, parameters_that_travel, cpu_config())[0]
    assert uploads and set(uploads) == {(True, torch.bfloat16)}


def test_unknown_fsdp2_internals_fall_back_to_float32_with_a_warning() -> None:
    """Oracle: a module that keeps its shards under no known name."""

    class Unknown(nn.Module):
        def _get_fsdp_state(self) -> object:
            return object()

    with pytest.warns(UserWarning, match="parameters travel in float32"):
        assert mirror_parameters([Unknown()], 0, torch.bfloat16, False) is None


def layer_and_optimizer(threads: int = 1) -> tuple[nn.Sequential, BucketedOptimizer]:
    """Two layers, each a unit, under workers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units = [(layer, list(layer.parameters())) for layer in model]
    return model, overlap_cpu_offload(plain, units, model=model, threads=threads)


def test_worker_error_is_raised_in_the_dependent_forward() -> None:
    """Oracle: the failing frame is in the traceback; the error of an unreached unit is raised at
    the next flush."""
    for failing, reached in ((0, 2), (1, 1)):
        model, optimizer = layer_and_optimizer()

        def burst(flat: Tensor) -> None:
            raise ArithmeticError("burst")

        optimizer.buckets[failing].update = burst  # type: ignore[method-assign]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(ArithmeticError, match="burst") as raised:
            if reached == 1:
                model[0](torch.ones(1, 4))
                optimizer.flush()
            else:
                model(torch.ones(1, 4))
        assert any(entry.name == "burst" for entry in raised.traceback)


def test_workers_divide_the_threads_without_affecting_other_threads() -> None:
    """Oracle: torch.get_num_threads in the workers, in this thread, and in one that starts
    afterwards."""
    before = torch.get_num_threads()
    for threads, expected in ((1, [1]), (6, [3, 3]), (7, [3, 3])):
        workers = Workers(threads)
        counts = list(
            workers.map(
                lambda _: torch.tensor(torch.get_num_threads()),
                [torch.ones(())] * len(expected),
            )
        )
        assert [int(number) for number in counts] == expected
        assert torch.get_num_threads() == before
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_rank_gets_its_share_of_the_cores_available_to_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: eight cores, of one rank, two and sixteen."""
    monkeypatch.setattr(cpu_offload, "available_cores", lambda: 8)
    assert [threads_per_rank(ranks) for ranks in (1, 2, 16)] == [8, 4, 1]
