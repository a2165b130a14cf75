"""Small training runs of the checks, on a device and on a CPU as its oracle.

    python scripts/smoke/runs.py DEVICE '{"row": ["parallel=fsdp2"]}'  # each row's numbers as JSON

Initial values are a function of a parameter's name, drawn on the CPU, so that every device begins
with the same.
"""

import gc
import hashlib
import json
import os
import shlex
import subprocess
import sys
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import set_allocator
from fsdptoys.metrics import StepMetrics
from fsdptoys.train.distributed import process_group
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from scripts.common.child_environment import child_environment

COMMON = shlex.split(
    "experiment=null data=synthetic metrics.console=none metrics.log_every=1 optim.lr=1e-3 "
    "optim.schedule=constant train.steps=3"
)
TINY = shlex.split(
    "model=llama_debug model.n_layers=4 train.batch_size=2 train.seq_len=64"
)
SMALL = shlex.split(
    "model=llama_debug model.dim=512 model.n_layers=4 model.n_heads=4 model.n_kv_heads=2 "
    "model.ffn_dim=1408 model.vocab_size=32000 train.batch_size=4 train.seq_len=512"
)
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@dataclass
class Trained:
    """Numbers of a run."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    digest: str = ""
    """SHA-256 over the final parameters."""
    peak_gib: float | None = None
    """Of tensors on the device, in the last two steps."""
    step_ms: float | None = None
    """The last step."""
    note: str = ""
    refused: bool = False
    """Whether the configuration says that this cannot be."""
    error: str = ""

    @property
    def bits(self) -> tuple[object, ...]:
        """Everything that is equal in every bit between two equal runs."""
        return self.losses, self.grad_norms, self.digest


def split_rows(rows: dict[str, str]) -> dict[str, list[str]]:
    """Return the words of each row's line."""
    return {name: shlex.split(line) for name, line in rows.items()}


def small_model(device: str) -> list[str]:
    """A model of 45M parameters on CUDA, the debug model elsewhere."""
    return SMALL if device == "cuda" else TINY


def fill(param: Tensor, name: str) -> None:
    """Ones for norms, and small numbers by the name for everything else."""
    local = local_tensor(param)
    if param.ndim == 1:
        local.fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        local.copy_(torch.empty(local.shape).normal_(0.0, 0.02, generator=generator))


def train(device: str, rows: dict[str, list[str]]) -> dict[str, Trained]:
    """Train every row in this process, one rank by itself."""
    os.environ.update(RANK)
    with process_group(compose_config([*COMMON, f"launch.device={device}"])):
        return {name: _train_row(device, overrides) for name, overrides in rows.items()}


def _train_row(device: str, overrides: list[str]) -> Trained:
    trained = Trained()
    gc.collect()
    try:
        config = compose_config([*COMMON, f"launch.device={device}", *overrides])
        config.validate(1, device)
        trainer = Trainer(config, param_init=fill)

        def on_step(step: StepMetrics) -> None:
            trained.losses.append(step.loss)
            trained.grad_norms.append(step.grad_norm)
            trained.peak_gib = step.memory_peak_gib
            trained.step_ms = 1e3 * step.step_time_seconds
            if step.step == 1:
                trainer.world.device.reset_peak_memory()

        trainer.world.device.reset_peak_memory()
        trainer.train(on_step)
        hashes = []
        for name, param in trainer.strategy.full_parameters():
            content = param.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            hashes.append(f"{name} {hashlib.sha256(content).hexdigest()}")
        # FSDP1 has them in another order than the model.
        trained.digest = hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()
        if trainer.compilation:
            compilation = trainer.compilation.result()
            trained.note = (
                f"{compilation.compiled} compiled in {compilation.seconds:.0f} s, "
                f"{len(compilation.recompilations)} again"
            )
            trained.note += f", graph breaks {sum(compilation.graph_breaks.values())}"
    except ConfigError as error:
        trained.error = str(error)
        trained.refused = True
    except Exception as error:
        print(f"row {' '.join(overrides)}", file=sys.stderr)
        traceback.print_exc()
        trained.error = (
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )
    return trained


def train_apart(device: str, rows: dict[str, list[str]]) -> dict[str, Trained]:
    """The same in a process of its own, as for the oracle on a CPU."""
    command = [sys.executable, __file__, device, json.dumps(rows)]
    process = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True
    )
    sys.stderr.write(process.stderr)
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])
    return {
        name: Trained(**row)
        for name, row in json.loads(process.stdout.splitlines()[-1]).items()
    }


if __name__ == "__main__":
    set_allocator()
    results = train(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps({name: asdict(row) for name, row in results.items()}), flush=True)
