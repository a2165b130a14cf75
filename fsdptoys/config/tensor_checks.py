"""Check tensor parallelism (``mesh.tp_size``) against model, data, optimizer and number formats."""

import math
from typing import Any, NoReturn, Protocol

from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, MoEConfig
from fsdptoys.optim import OptimConfig
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.mesh import Axes
from fsdptoys.tune import LoRAConfig, TuneConfig


class Sections(Protocol):
    """Sections of a configuration that affect these checks; ``schema.Config`` has them."""

    train: Any
    model: ModelConfig
    optim: OptimConfig
    tune: TuneConfig


def check_tensor(config: Sections, axes: Axes) -> None:
    """Refuse features or tokens that the ranks do not divide, and settings that need full matrices.

    Raises:
        ConfigError: naming key, value and fix.
    """
    slices = config.train.slices
    if isinstance(config.tune, LoRAConfig) and (axes.tp > 1 or slices > 1):
        setting = f"mesh.tp_size={axes.tp}" if axes.tp > 1 else f"train.slices={slices}"
        key = setting.partition("=")[0]
        raise ConfigError(f"tune=lora adds to the layers that {setting} splits; set {key}=1 or tune=full")
    if axes.tp == 1:
        return
    sizes = split_sizes(config.model)
    undivided = {key: size for key, size in sizes.items() if size % axes.tp}
    if undivided:
        key, size = next(iter(undivided.items()))
        common = math.gcd(axes.tp, *sizes.values())
        fix = f"set mesh.tp_size={max(ranks for ranks in range(1, common + 1) if common % ranks == 0)}"
        if list(undivided) == ["vocab_size"]:
            fix += f" or model.vocab_size={-(-size // axes.tp) * axes.tp}"
        raise ConfigError(f"mesh.tp_size={axes.tp} splits features, and must divide model.{key}={size}; {fix}")
    seq_len, pieces = config.train.seq_len, axes.sharing
    if seq_len % pieces:
        shared = f" with mesh.cp_size={axes.cp}" if axes.cp > 1 else ""
        raise ConfigError(
            f"train.seq_len={seq_len} must be a multiple of {pieces}, the pieces into which mesh.tp_size={axes.tp} "
            f"cuts a sequence between layers{shared}; set train.seq_len={max(1, seq_len // pieces) * pieces}"
        )
    _check_formats(config, axes.tp)


def split_sizes(model: ModelConfig) -> dict[str, int]:
    """Key → size of everything that tensor parallelism splits."""
    sizes = {"n_heads": model.n_heads, "n_kv_heads": getattr(model, "n_kv_heads", model.n_heads)}
    if not (isinstance(model, MoEConfig) and model.has_experts_everywhere(model.n_layers)):
        sizes["ffn_dim"] = getattr(model, "ffn_dim", None) or model.implied()["ffn_dim"]
    if isinstance(model, MoEConfig) and model.shares_an_expert:
        sizes["expert_ffn_dim"] = model.expert_ffn_dim
    return sizes | {"vocab_size": model.vocab_size}


def _check_formats(config: Sections, ranks: int) -> None:
    train, optim = config.train, config.optim

    def refuse(setting: str, reason: str, fix: str) -> NoReturn:
        raise ConfigError(f"{setting} {reason}, which mesh.tp_size={ranks} splits; set {fix} or mesh.tp_size=1")

    if train.float8 is not Float8.none:
        refuse(
            f"train.float8={train.float8.value}", "scales by the largest number of a full matrix", "train.float8=none"
        )
    if optim.exchanges_matrices:
        refuse(f"optim={optim.name}", "orthogonalizes full matrices", "optim=adamw")
    if optim.low_bit_format is not None:
        setting = f"optim.state_dtype={optim.low_bit_format}"
        refuse(setting, "keeps a scale for each part of a full row", "optim.state_dtype=bfloat16")
    if isinstance(config.model, MoEConfig) and not fsdp2_can_sum():
        refuse(
            f"model={config.model.name or config.model.family}",
            "has experts, for which FSDP2 must sum gradients (torch 2.11 and later can), and tokens",
            "parallel=ddp",
        )
