"""Overlapped CPU offload: bitwise equality with PyTorch's own, worker threads, and the low-precision mirror."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdptoys.config.schema import Config
from fsdptoys.loss import cross_entropy_sum
from fsdptoys.memory import MemoryConfig, cpu_offload
from fsdptoys.memory.bucketed_optimizer import BucketedOptimizer
from fsdptoys.memory.cpu_offload import Workers, overlap_cpu_offload, threads_per_rank
from fsdptoys.memory.updates import cpu_threads
from fsdptoys.optim import AdamWConfig, Implementation, SGDConfig, WeightDecayOn
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.cpu_offload_cast import Mirror, mirror_parameters
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.parallel.precision import DType
from scripts.ranks import run_ranks
from tests.memory.offloaded import OVERLAPPED, offloaded, take_steps, train_all, trainer
from tests.parallel.groups import Pairs, levels, trained_rows
from tests.parallel.runs import TINY, make_config, supported, tiny_model

SMALL = replace(tiny_model(), n_layers=2)


def config(dtype: DType = DType.bfloat16, ranks: int = 2, **options: Any) -> Config:
    parallel = FSDP2Config(param_dtype=dtype, **options.pop("parallel", {}))
    settings = {"model": SMALL, "steps": 4, "seq_len": 8, "batch_size": 1, **options}
    return make_config(parallel, ranks, memory=MemoryConfig(cpu_offload=True), **settings)


VARIANTS: dict[str, dict[str, Any]] = {
    "20 steps": {"steps": 20, "deterministic": False},
    "deterministic": {},
    "no clipping": {"max_grad_norm": None},
    "one micro-batch": {"grad_accum": 1},
    "parts, prefetch": {"parallel": {"wrap": Wrap.block_attn_mlp, "forward_prefetch": 2}},
    "never resharded": {"parallel": {"reshard_after_forward": ReshardAfterForward.never}},
    "tied": {"model": tiny_model(tie_embeddings=True)},
    "sgd": {"optim": SGDConfig(lr=0.1, weight_decay_on=WeightDecayOn.all)},
    "experts": {"model": TINY["qwen3_moe"]},
    "positions": {"model": TINY["gpt2"]},
    "fused": {"optim": AdamWConfig(lr=1e-2, implementation=Implementation.fused), "deterministic": False},
    "foreach": {"optim": AdamWConfig(lr=1e-2, implementation=Implementation.foreach), "deterministic": False},
}
"""Settings that interact with the hooks, the threads or the mirror; without a mirror fewer are needed."""
ROWS = {
    f"{name} {dtype.value}": offloaded(2, config(dtype, **{"steps": 3, **options}), OVERLAPPED)
    for dtype, (name, options) in product(DType, VARIANTS.items())
    if dtype is DType.bfloat16 or name in ("deterministic", "parts, prefetch", "fused")
}
ROWS["hsdp2"] = offloaded(4, config(ranks=4, fsdp_size=2, steps=3), OVERLAPPED)
ROWS = supported(ROWS)
SHORT = {
    *("deterministic bfloat16", "parts, prefetch bfloat16", "tied bfloat16", "sgd bfloat16", "experts bfloat16"),
    *("fused float16", "parts, prefetch float32"),
}
trained = trained_rows(ROWS, train_all)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_overlapped_executor_matches_native_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: CPUOffloadPolicy and the plain optimizer: losses, norms, parameters."""
    overlapped, native = trained[row]
    assert overlapped == native


def losses_of_written_mirrors(config: Config) -> dict[str, tuple[float, bool]]:
    """Loss of the same batch, and whether mirror and master agree: unchanged, and after writing to one of them."""
    made = trainer(config, OVERLAPPED)
    assert isinstance(made.strategy, FSDP2) and isinstance(made.optimizer, BucketedOptimizer)
    take_steps(made, 1, 2)
    made.optimizer.flush()
    tokens_BT, labels_BT = made.batches.next_step()[0]
    refresh = made.optimizer.executor._on_updated  # type: ignore[attr-defined]
    mirror: Mirror = refresh.__self__

    @torch.no_grad()
    def loss() -> tuple[float, bool]:
        value = float(made.strategy.model(tokens_BT, labels_BT, cross_entropy_sum))
        for module in made.strategy.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the last unit stays gathered where no backward follows
        agree = all(torch.equal(entry.mirror, entry.master.to(entry.mirror.dtype)) for entry in entries)
        return value, agree

    entries = [entry for unit in mirror._entries for entry in unit]
    losses = {"as it is": loss()}
    with torch.no_grad():
        for entry in entries:
            assert entry.fsdp_param._sharded_param_data is entry.mirror and entry.mirror.dtype == torch.bfloat16
            entry.mirror.mul_(1.5)
        losses["mirror written"] = loss()
        for _, param in made.strategy.named_parameters():
            param.mul_(1.25)
        losses["master written"] = loss()
        state = {name: value / 1.25 for name, value in made.strategy.model.state_dict().items()}
    made.strategy.model.load_state_dict(state)
    losses["loaded"] = loss()
    return losses


def test_forward_uses_the_mirror_which_follows_the_master() -> None:
    """Oracle: the loss changes with the mirror alone, also with the master, and back when the weights are
    loaded.
    """
    losses = run_ranks(2, losses_of_written_mirrors, config())[0]
    assert [agree for _, agree in losses.values()] == [True, False, True, True]
    values = {name: value for name, (value, _) in losses.items()}
    assert values["as it is"] != values["mirror written"] != values["master written"] != values["as it is"]
    assert values["loaded"] == pytest.approx(values["as it is"], rel=1e-3)


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
    """Oracle: the failing frame is in the traceback; the error of an unreached unit is raised at the next flush."""
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
    """Oracle: torch.get_num_threads in the workers, in this thread, and in one that starts afterwards."""
    before = torch.get_num_threads()
    for threads, expected in ((1, [1]), (6, [3, 3]), (7, [3, 3])):
        workers = Workers(threads)
        seen = list(workers.map(lambda _: torch.tensor(torch.get_num_threads()), [torch.ones(())] * len(expected)))
        assert [int(number) for number in seen] == expected
        assert torch.get_num_threads() == before
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_rank_gets_its_share_of_the_cores_available_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: eight cores, of one rank, two and sixteen."""
    monkeypatch.setattr(cpu_offload, "available_cores", lambda: 8)
    assert [threads_per_rank(ranks) for ranks in (1, 2, 16)] == [8, 4, 1]
