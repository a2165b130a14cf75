"""What an optimizer can and cannot do under a strategy, with offload and on a device, told before anything starts."""

from typing import Protocol

from .errors import ConfigError
from .memory import CPUOffloadExecutor, MemoryConfig
from .optim import AdamWConfig, Implementation, MuonConfig, OptimConfig, StateDType, WeightDecayOn
from .parallel import ParallelConfig


class Loop(Protocol):
    """What matters here of the configuration of the loop."""

    grad_accum: int
    deterministic: bool


def check_optimizer(
    optim: OptimConfig, parallel: ParallelConfig, memory: MemoryConfig, train: Loop, device_type: str
) -> None:
    """Resolve what says ``auto``, and check the optimizer against whatever its parameters depend on.

    Raises:
        ConfigError: the first mistake.
    """
    deterministic = train.deterministic
    if parallel.name == "fsdp1" and memory.cpu_offload and deterministic and train.grad_accum > 1:
        # Each reduction would overwrite the offloaded gradient of the one before.
        raise ConfigError(
            f"train.grad_accum={train.grad_accum} with train.deterministic=true reduces after every "
            "micro-batch, which FSDP1 cannot add up under memory.cpu_offload=true; set parallel=fsdp2"
        )
    _check_states(optim, memory)
    if isinstance(optim, MuonConfig):
        _check_muon(parallel, memory)
        optim.resolve(deterministic)
    on_cpu = device_type == "cpu" or memory.cpu_offload
    # An accelerator has its own bits in the deterministic mode with offload too, and those are not the fused ones.
    may_fuse = device_type == "cpu" or (memory.cpu_offload and not deterministic)
    if optim.implementation is Implementation.auto and may_fuse and optim.name != "sgd":
        # On a CPU it is several times as fast as what PyTorch would choose.
        optim.implementation = Implementation.fused
    fused = optim.implementation is Implementation.fused
    if fused and optim.name == "sgd" and parallel.name in ("fsdp2", "toy_fsdp"):
        raise ConfigError(
            "optim.implementation=fused has no SGD for FSDP2's sharded parameters; set optim.implementation=foreach"
        )
    if fused and optim.name == "sgd" and deterministic and on_cpu:
        raise ConfigError(
            "optim.implementation=fused has SGD round by a shard's size on a CPU, which train.deterministic=true "
            "rules out; set optim.implementation=auto"
        )
    if not parallel.keeps_parameters and optim.weight_decay > 0 and optim.weight_decay_on is WeightDecayOn.matrices:
        raise ConfigError(
            "optim.weight_decay_on=matrices cannot tell parameters apart under parallel.use_orig_params=false; "
            "set optim.weight_decay_on=all or parallel.use_orig_params=true"
        )


def _check_states(optim: OptimConfig, memory: MemoryConfig) -> None:
    if not isinstance(optim, AdamWConfig) or optim.state_dtype is StateDType.float32:
        return
    if memory.optimizer_offload:
        raise ConfigError(
            "optim.state_dtype=bfloat16 is of states that stay where they are, which memory.optimizer_offload=true "
            "moves; set memory.offload_state_dtype=bfloat16 and optim.state_dtype=float32"
        )
    if memory.cpu_offload and memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
        raise ConfigError(
            "optim.state_dtype=bfloat16 is not an option of memory.cpu_offload_executor=overlapped; set "
            "memory.cpu_offload_executor=native or optim.state_dtype=float32"
        )


def _check_muon(parallel: ParallelConfig, memory: MemoryConfig) -> None:
    """Muon needs matrices that lie whole on the device, or cut along one dim."""
    if parallel.matrices_lost:
        raise ConfigError(
            f"optim=muon orthogonalises whole matrices, which parallel={parallel.name} "
            f"{parallel.matrices_lost}; set parallel=fsdp2 or optim=adamw"
        )
    for name in ("optimizer_offload", "cpu_offload"):
        if getattr(memory, name):
            raise ConfigError(
                f"memory.{name}=true is not an option of optim=muon, whose update needs whole matrices on the "
                f"device; set memory.{name}=false or optim=adamw"
            )
