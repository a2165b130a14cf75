"""This project's trainer on one device, with values drawn there: those of a real start take a
minute for 8B parameters.

python scripts/benchmarks/peers/ours.py WORDS OF THE COMMAND LINE
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.compilation import compilation_line
from fsdptoys.train.distributed import process_group
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from scripts.benchmarks.peers.values import INIT_STD, draw


def fill(param: Tensor, name: str) -> None:
    """Ones for norms, and small numbers for matrices, of a parameter or this rank's shard of it."""
    local = local_tensor(param)
    if param.ndim == 1:
        local.fill_(1.0)
    else:
        local.normal_(0.0, INIT_STD)


def on_step(step: StepMetrics) -> None:
    """One line, at once, as the peers do."""
    print(f"step {step.step} loss {step.loss!r}", flush=True)


if __name__ == "__main__":
    config = compose_config(sys.argv[1:])
    config.validate(1, config.launch.device.value)
    style = config.model.hugging_face
    with process_group(config):
        trainer = Trainer(
            config, param_init=lambda param, name: draw(param, style.tensor_name(name))
        )
        trainer.train(on_step)
        if trainer.compilation:
            print(f"note {compilation_line(trainer.compilation.result())}", flush=True)
        memory = trainer.world.device.memory()
        if memory is not None:
            print(f"peak {memory.peak_bytes}", flush=True)
