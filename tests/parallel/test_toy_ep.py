"""The toy's expert parallelism in the trainer: ranks that split experts train like one process."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.optim import SGDConfig
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig, ToyEPConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import is_dtensor, local_bounds, local_tensor
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config

MODELS: dict[str, ModelConfig] = {
    name: dataclasses.replace(TINY[name], n_experts=4)
    for name in ("qwen3_moe", "llama4")  # type: ignore[call-arg]
}
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
RUNS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model": MODELS["qwen3_moe"]},
    "recomputed": {"model": MODELS["qwen3_moe"], "memory": CHECKPOINTED},
    "llama4": {"model": MODELS["llama4"]},
    "clipped by less": {"model": MODELS["qwen3_moe"], "max_grad_norm": 1e-3, "deterministic": True},
}

Losses = list[tuple[float, float]]
Arrays = dict[str, NDArray[Any]]


def config_of(parallel: ParallelConfig, ranks: int, run: str, ep_size: int = 1) -> Config:
    """A run of three steps, with an optimizer that does not magnify the last bits of small gradients."""
    options = {"steps": 3, "deterministic": False, "optim": SGDConfig(lr=0.1, momentum=0.9)}
    config = make_config(parallel, ranks, **{**options, **RUNS[run]})
    config.mesh.ep_size = ep_size
    config.validate(ranks, "cpu")
    return config


def train(configs: list[Config]) -> list[tuple[Losses, Arrays, Arrays]]:
    """Losses and gradient norms of each run, its final parameters, and the tensors of a checkpoint."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        params = {name: param.numpy().copy() for name, param in trainer.strategy.full_parameters()}
        losses = [(step.loss, step.grad_norm) for step in trainer.history]
        results.append((losses, params, saved(trainer)))
    return results


def saved(trainer: Trainer) -> Arrays:
    """The tensors of a checkpoint, in full."""
    tensors = trainer.strategy.state_tensors(trainer.optimizer)
    full = {name: tensor.full_tensor() if is_dtensor(tensor) else tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().numpy().copy() for name, tensor in full.items()}


def assert_close(found: Arrays, expected: Arrays, run: str) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in found.items():
        assert array.shape == expected[name].shape, (run, name)
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=f"{run}: {name}")


@pytest.mark.parametrize(("ranks", "ep_size"), [(2, 2), (4, 2)])
def test_models_with_experts_train_like_one_process(ranks: int, ep_size: int) -> None:
    """Oracle: losses, norms, parameters and momenta of one process; two micro-batches a step with ragged padding."""
    simulated = [config_of(SingleConfig(simulated_ranks=ranks), 1, run) for run in RUNS]
    expected = run_ranks(1, train, simulated)[0]
    for of_rank in run_ranks(ranks, train, [config_of(ToyEPConfig(), ranks, run, ep_size) for run in RUNS]):
        for run, (losses, params, tensors), one_process in zip(RUNS, of_rank, expected, strict=True):
            for found, wanted in zip(losses, one_process[0], strict=True):
                assert found == pytest.approx(wanted, rel=1e-5), run
            assert_close(params, one_process[1], run)
            assert_close(tensors, one_process[2], run)


def load_into_another(ranks: int, ep_size: int) -> bool:
    """Whether a checkpoint of FSDP2 has the same tensors after loading under the toy, and the toy's under FSDP2."""
    first, second = (
        config_of(parallel, ranks, "qwen3_moe", size)
        for parallel, size in ((FSDP2Config(), 1), (ToyEPConfig(), ep_size))
    )
    second.train.init_seed = 7
    equal = True
    for source, target in ((first, second), (second, first)):
        trained, other = Trainer(source), Trainer(target)
        trained.train()
        kept = saved(trained)

        def load(tensors: dict[str, Tensor], kept: Arrays = kept) -> None:
            for name, tensor in tensors.items():
                bounds = tuple(slice(low, high) for low, high in local_bounds(tensor)) if tensor.ndim else ()
                local_tensor(tensor).copy_(torch.from_numpy(kept[name])[bounds])

        other.strategy.load_state_tensors(other.optimizer, load)
        found = saved(other)
        equal = equal and all(np.array_equal(found[name], array) for name, array in kept.items())
    return equal


def test_checkpoints_go_to_fsdp2_and_back() -> None:
    """Oracle: the saved tensors in full, bitwise, before and after loading; two copies of each expert."""
    assert run_ranks(4, load_into_another, 4, 2) == [True] * 4


SPLIT = ["parallel=toy_ep", "model=qwen3_moe_debug", "mesh.ep_size=2"]
REFUSED: list[tuple[list[str], str]] = [
    ([*SPLIT, "model=llama_debug"], "mesh.ep_size=2 splits experts, and a llama model has none"),
    ([*SPLIT, "model.n_experts=5"], "mesh.ep_size=2 must divide model.n_experts=5; set mesh.ep_size=1"),
    ([*SPLIT, "train.compile=true"], "set train.compile=false"),
    ([*SPLIT, "memory.optimizer_offload=true"], "memory.optimizer_offload=true is not an option of parallel=toy_ep"),
    ([*SPLIT, "mesh.cp_size=2"], "mesh.cp_size=2 is not an option of parallel=toy_ep"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_settings_that_cannot_split_experts_are_refused(words: list[str], message: str) -> None:
    """Oracle: the expected message, before anything starts."""
    with pytest.raises(ConfigError) as raised:
        compose_config(words).validate(2, "cpu")
    assert message in str(raised.value)
