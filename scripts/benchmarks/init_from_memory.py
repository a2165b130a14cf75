"""How much host memory a rank takes to start from a folder in Hugging Face format.

    python scripts/benchmarks/init_from_memory.py [PRESET] [RANKS]

Writes random bf16 weights of a preset into a temporary folder, and fills an FSDP2 model from it on
gloo ranks. Prints the peak of each rank's resident set and its final size. The peak is
Linux's own (``VmHWM``), from just before the model is made. Pages of the file that a rank reads
count while they are mapped.
"""

import math
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptoys.checkpoint import HuggingFaceFolder, write_hugging_face
from fsdptoys.config.compose import compose_config
from fsdptoys.device import Device
from fsdptoys.models import ModelConfig
from fsdptoys.models.huggingface import Bounds
from fsdptoys.parallel import FSDP2Config, World
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.utils.tables import markdown_table
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

MIB = 2**20
FILE_BYTES = 512 * MIB


def main(preset: str = "llama3_1b", ranks: str = "2") -> None:
    """Measure and print a table."""
    world_size = int(ranks)
    with progress(2), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "folder"
        # In a process of its own, or the ranks would inherit free memory.
        with unit("random weights are written"):
            (tensor_bytes,) = run_ranks(1, write_folder, preset, folder)
        with unit(f"{world_size} ranks read their shards"):
            results = run_ranks(world_size, fill, folder)
    parameters = sum(elements for _, elements, _ in results)
    print(
        f"{preset}: {parameters:,} parameters, read as bf16 into float32 shards on {world_size} "
        f"ranks, torch {torch.__version__}\nlargest region that a tensor of the files is made of: "
        f"{tensor_bytes / MIB:,.0f} MiB\n"
    )
    rows = [
        ["rank", "shard, MiB", "peak, MiB", "peak beyond the shard, MiB", "seconds"]
    ]
    for rank, (growth, elements, seconds) in enumerate(results):
        sizes = [4 * elements, growth, growth - 4 * elements]
        rows.append(
            [str(rank), *(f"{size / MIB:,.0f}" for size in sizes), f"{seconds:.1f}"]
        )
    print(markdown_table(rows))


def write_folder(preset: str, folder: Path) -> int:
    """Write random weights; return bytes of the largest tensor."""
    config: ModelConfig = compose_config([f"model={preset}"]).model
    sizes = [0]

    def draw(name: str, region: Bounds) -> Tensor:
        shape = [last - first for first, last in region]
        sizes.append(2 * math.prod(shape))
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, config.init_std)

    write_hugging_face(folder, config, draw, torch.bfloat16, FILE_BYTES)
    return max(sizes)


def fill(folder: Path) -> tuple[int, int, float]:
    """Fill this rank's shard; return the growth of the peak in bytes, the shard's elements, and the
    seconds."""
    context = World(
        Device("cpu", 0), dist.get_rank(), dist.get_world_size(), MeshConfig()
    )
    parallel = FSDP2Config()
    parallel.resolve(deterministic=False)
    strategy = parallel.build(context)
    source = HuggingFaceFolder(folder)
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    before = peak_bytes()
    started = time.perf_counter()
    with torch.device("meta"):
        model = source.model_config().build()
    source.check(model)
    strategy.shard(model, source.fill)
    seconds = time.perf_counter() - started
    shards = [
        param.to_local() for param in model.parameters() if isinstance(param, DTensor)
    ]
    return peak_bytes() - before, sum(shard.numel() for shard in shards), seconds


def peak_bytes() -> int:
    """Largest resident set of this process since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
