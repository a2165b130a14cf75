"""Optimizer steps in the backward against the ordinary ones, and the gradients that they free."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdptoys.config.schema import Config
from fsdptoys.memory import (
    GradientCheckpointing,
    MemoryConfig,
)
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    OptimStateDType,
    SGDConfig,
    WeightDecayOn,
)
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.torchao import torchao_fault
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pair, Pairs, levels, trained_rows
from tests.harness.tiny import (
    EVEN,
    TINY,
    WITH_BLOCKS,
    make_config,
    refusal,
    supported,
    tiny_model,
    with_sizes,
)

WITHOUT_CLIPPING = {"max_grad_norm": None, "skip_nonfinite": False, "grad_accum": 1}


def config(
    parallel: ParallelConfig, ranks: int, in_backward: bool, **options: Any
) -> Config:
    memory = replace(
        options.pop("memory", MemoryConfig()), optimizer_in_backward=in_backward
    )
    return make_config(
        parallel, ranks, memory=memory, **{**WITHOUT_CLIPPING, **options}
    )


def row(parallel: ParallelConfig, ranks: int, **options: Any) -> Pair:
    """Return a run with optimizer steps in the backward, and one without."""
    return (ranks, config(parallel, ranks, True, **options)), (
        ranks,
        config(parallel, ranks, False, **options),
    )


def rows() -> dict[str, Pair]:
    decays = {"weight_decay_on": WeightDecayOn.all}
    bfloat16 = AdamWConfig(state_dtype=OptimStateDType.bfloat16, **decays)
    int8 = AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.int8)
    checkpointed = MemoryConfig(
        gradient_checkpointing=GradientCheckpointing.full, chunk_loss=True
    )
    settings: dict[str, dict[str, Any]] = {
        "adamw, tied": {"tie_embeddings": True},
        "not deterministic": {"deterministic": False},
        "foreach": {
            "optim": AdamWConfig(implementation=Implementation.foreach, **decays)
        },
        "sgd": {"optim": SGDConfig(lr=0.1, **decays), "model": TINY["gpt2"]},
        "states of bfloat16": {"optim": bfloat16},
        "states of int8": {"optim": int8, "model": WITH_BLOCKS["qwen3_moe"]},
        "bfloat16": {"model": TINY["qwen3_moe"]},
        "checkpointing, chunked loss": {"memory": checkpointed},
    }
    table = {"fsdp2 alone": row(FSDP2Config(), 1)}
    if fsdp2_can_sum():
        features = with_sizes(tiny_model(), **EVEN)
        table["split features on 2"] = row(FSDP2Config(), 2, model=features, tp_size=2)
    if torchao_fault() is None:
        model = WITH_BLOCKS["llama"]
        table["float8 on 2"] = row(
            FSDP2Config(),
            2,
            model=model,
            float8=Float8.tensorwise,
            float8_all_gather=True,
        )
    for parallel, ranks in ((SingleConfig(), 1), (FSDP2Config(), 2)):
        for name, options in settings.items():
            dtype = DType.bfloat16 if name == "bfloat16" else DType.float32
            table[f"{name} on {ranks}"] = row(
                replace(parallel, param_dtype=dtype), ranks, **options
            )
    return supported(table)


ROWS = rows()
SHORT = {row for row in ROWS if row.endswith("on 2") and "foreach" not in row} | {
    "adamw, tied on 1"
}
trained = trained_rows(ROWS)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_optimizer_in_backward_equals_the_ordinary_step_bitwise(
    row: str, trained: Pairs
) -> None:
    """Oracle: the same strategy without: losses, gradient norms and parameters."""
    in_backward, ordinary = trained[row]
    assert in_backward == ordinary


def test_gradients_of_several_simulated_ranks_are_refused() -> None:
    """Oracle: the expected message."""
    memory = MemoryConfig(optimizer_in_backward=True)
    assert refusal(
        SingleConfig(simulated_ranks=2), 1, memory=memory, **WITHOUT_CLIPPING
    ) == (
        "memory.optimizer_in_backward=true frees gradients as they come, and parallel=single "
        "adds them up with parallel.simulated_ranks=2; set parallel=fsdp2 or "
        "memory.optimizer_in_backward=false"
    )


class Gradients:
    """Observes the gradients of a trainer before each update.

    Storages are counted rather than the allocator's bytes: their peak depends on when gloo's
    threads let go of the buffers of a collective.
    """

    def __init__(self, trainer: Trainer, most_bytes: float) -> None:
        self.params = [param for _, param in trainer.strategy.named_parameters()]
        self.most_params = 0
        self.most_bytes = most_bytes
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def live_bytes(self) -> int:
        """Return the bytes of all gradients so far that something still refers to."""
        return sum(
            nbytes
            for storage, nbytes in self._storages.values()
            if not storage.expired()
        )

    def look(self) -> None:
        """Count gradients, and wait until the storages of earlier ones are freed."""
        self._record()
        wait_until(
            lambda: self.live_bytes() <= self.most_bytes,
            f"at most {self.most_bytes} bytes of gradients",
        )

    def _record(self) -> None:
        grads: list[Tensor] = [
            param.grad for param in self.params if param.grad is not None
        ]
        self.most_params = max(self.most_params, len(grads))
        for grad in grads:
            storage = local_tensor(grad).untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


def count_gradients(config: Config, most_bytes: float) -> tuple[int, int]:
    """Return the largest number of gradients before an update, and the number of parameters."""
    trainer = Trainer(config)
    gradients = Gradients(trainer, most_bytes)
    trainer.stepper.before_update(lambda *_: gradients.look())
    for step in range(1, 4):
        trainer.train_step(step)
    return gradients.most_params, len(gradients.params)


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_in_backward_frees_gradients_early(ranks: int) -> None:
    """Oracle: parameters with a gradient before each update, and storages of gradients by weak
    references.

    FSDP2 keeps the gradients of a block in one storage. All of them exist without this option.
    """
    parallel: ParallelConfig = SingleConfig() if ranks == 1 else FSDP2Config()
    model = replace(tiny_model(), n_layers=8)
    options: dict[str, Any] = {
        "model": model,
        "seq_len": 4,
        "batch_size": 1,
        "deterministic": False,
    }
    with torch.device("meta"):
        params: list[nn.Parameter] = list(model.build().layers[0].parameters())
    block_bytes = 4 * sum(param.numel() for param in params)
    freeing = config(parallel, ranks, True, **options)
    for few, count in run_ranks(
        ranks, count_gradients, freeing, 3 * block_bytes / ranks
    ):
        assert few == 1 < count
    most, count = run_ranks(
        ranks, count_gradients, config(parallel, ranks, False, **options), float("inf")
    )[0]
    assert most == count
