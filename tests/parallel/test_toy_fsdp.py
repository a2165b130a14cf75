"""The readable FSDP in the trainer: the runs of ``parallel=fsdp2``, bitwise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.cli.plan import plan_command
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim.config import set_schedule
from fsdptoys.parallel import FSDP2Config, ToyFSDPConfig, host_copy
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from scripts.parity import Outcome, hash_parameters, train_all
from scripts.ranks import run_ranks
from tests.memory.offloaded import outcome, take_steps, trainer
from tests.parallel.runs import TINY, make_config, tiny_model

MODELS = {
    "llama": tiny_model(),
    "tied": tiny_model(tie_embeddings=True),
    **{name: TINY[name] for name in ("gpt2", "qwen3_moe")},
}
SHORT: dict[str, Any] = {"steps": 2, "seq_len": 12}
CHECKPOINTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)


def pair(ranks: int, settings: dict[str, Any], options: dict[str, Any]) -> list[Config]:
    """The same run under the readable FSDP and under PyTorch's."""
    return [make_config(kind(**settings), ranks, **{**SHORT, **options}) for kind in (ToyFSDPConfig, FSDP2Config)]


def variants(ranks: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Settings of the strategy, and of the rest of the run."""
    made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        name: ({}, {"model": model, "deterministic": False}) for name, model in MODELS.items()
    }
    if ranks == 2:
        made |= {
            "deterministic": ({}, {}),
            "bf16": ({"param_dtype": DType.bfloat16}, {"deterministic": False}),
            "parts, freed, recomputed": (
                {"wrap": Wrap.block_attn_mlp, "reshard_after_forward": ReshardAfterForward.always},
                {"memory": CHECKPOINTED},
            ),
            "not freed, prefetched": (
                {"reshard_after_forward": ReshardAfterForward.never, "forward_prefetch": 2, "backward_prefetch": 2},
                {"memory": MemoryConfig(chunk_loss=True)},
            ),
            "states offloaded": ({}, {"memory": MemoryConfig(optimizer_offload=True)}),
        }
    if ranks == 4:
        made["hsdp"] = ({}, {"fsdp_size": 2, "deterministic": False})
    return made


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_toy_fsdp_matches_fsdp2_bitwise(ranks: int) -> None:
    """Oracle: ``parallel=fsdp2`` with the same arguments: losses, norms and parameters, in float32 and in bf16."""
    made = variants(ranks)
    configs = [config for settings, options in made.values() for config in pair(ranks, settings, options)]
    outcomes = run_ranks(ranks, train_all, configs)[0]
    differing = {name for i, name in enumerate(made) if outcomes[2 * i] != outcomes[2 * i + 1]}
    assert differing == set()


def hand_over(configs: list[Config]) -> list[Outcome]:
    """Train under the first, resume its state from the middle under the second; also finish the first."""
    first, second = (trainer(config, None) for config in configs)
    take_steps(first, 1, 2)
    saved = host_copy(first.strategy.state_tensors(first.optimizer))
    position = first.batches.state_dict()
    take_steps(first, 3, 4)

    def load(tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == saved.keys()
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])

    with torch.no_grad():
        second.strategy.load_state_tensors(second.optimizer, load)
    set_schedule(second.schedule, 2)
    second.batches.load_state_dict(position)
    take_steps(second, 3, 4)
    return [outcome(first), outcome(second)]


@pytest.mark.parametrize("order", [1, -1], ids=["to fsdp2", "from fsdp2"])
def test_run_resumes_under_the_other_implementation(order: int) -> None:
    """Oracle: the same run under one implementation."""
    configs = pair(2, {}, {"steps": 4, "tie_embeddings": True})[::order]
    stayed, went = run_ranks(2, hand_over, configs)[0]
    assert went.parameters == stayed.parameters and went.losses == stayed.losses[-len(went.losses) :]


def full_hashes(config: Config) -> list[dict[str, str]]:
    """Parameters before a step and after an evaluation, which has no backward."""
    made = Trainer(config)
    before = hash_parameters(made)
    made.strategy.model.eval()
    with torch.no_grad():
        made.strategy.model(torch.zeros(1, 4, dtype=torch.long))
    return [before, hash_parameters(made)]


def test_parameters_are_visible_in_full_after_a_forward_without_backward() -> None:
    """Oracle: the parameters before it."""
    before, after = run_ranks(2, full_hashes, make_config(ToyFSDPConfig(), 2, **SHORT))[0]
    assert before == after


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "cpu offload": (
        lambda: make_config(ToyFSDPConfig(), 2, memory=MemoryConfig(cpu_offload=True)),
        "memory.cpu_offload=true is not an option of parallel=toy_fsdp; set parallel=fsdp2 or memory.cpu_offload=false",
    ),
    "plan": (
        lambda: plan_command(["parallel=toy_fsdp", "plan.hardware=h100"]),
        "parallel=toy_fsdp cannot be predicted; set parallel=fsdp2, which is closest",
    ),
    "search": (
        lambda: plan_command(["search", "parallel=toy_fsdp", "plan.hardware=h100"]),
        "parallel=toy_fsdp cannot be predicted; set parallel=fsdp2, which is closest",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_settings_are_refused_in_one_sentence(name: str) -> None:
    """Oracle: the expected message."""
    call, sentence = REFUSALS[name]
    with pytest.raises(ConfigError) as mistake:
        call()
    assert str(mistake.value) == sentence


def test_toy_fsdp_composes_from_the_command_line() -> None:
    """Oracle: the typed argument."""
    config = compose_config(["parallel=toy_fsdp", "parallel.wrap=block_attn_mlp", "model=llama_debug"])
    assert config.parallel == ToyFSDPConfig(wrap=Wrap.block_attn_mlp)
