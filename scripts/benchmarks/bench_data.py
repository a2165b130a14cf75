"""How fast data is read, made, and waited for: ``python scripts/benchmarks/bench_data.py --write
benchmarks/data.md``.

- Reading: tokens from memory-mapped shards through ``BatchStream``, shuffled, in one process
  without workers, of one folder or several mixed, for each second of its CPU time. The shards are
  in the page cache, so this is the reader's cost and not a disk's. The exit status is 1 below
  ``BAR``.
- Preparing: text through the function of ``fsdptoys data prepare``, by number of processes.
- Waiting: the share of a tiny training's step time that waits for data, as reported by the run.

Not covered: disks, networks, more cores than this machine has.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from fsdptoys.data import (
    BatchStream,
    Request,
    find_sources,
    open_encoder,
    prepare_folder,
)
from fsdptoys.data.dataset_index import Index
from fsdptoys.data.packing import Packing
from fsdptoys.data.permutation import EndlessShuffle
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.data.shard_writer import ShardsWriter
from fsdptoys.train.recorded_run import read_recorded_run
from scripts.common.machine import machine
from scripts.common.progress import doing, progress, unit

BAR = 20e6
"""Tokens that one core must read in a second."""
BATCH = 8
VOCAB = 50_000
READING_KINDS = 5
"""Rows of the reader for each length."""
ROOT = Path(__file__).resolve().parents[2]


def write_shards(folder: Path, tokens: int, shards: int, wide: bool) -> str:
    """A folder of random ids, in documents of 3 to 2,000, and 1,001 or so on average."""
    dtype = "uint32" if wide else "uint16"
    writer = ShardsWriter(folder, "benchmark", dtype, tokens // shards)
    random = np.random.default_rng(0)
    left = tokens
    while left:
        lengths = random.integers(3, 2001, 1000)
        lengths = lengths[
            : max(1, int(np.searchsorted(np.cumsum(lengths), left, side="right")))
        ]
        lengths[-1] = min(lengths[-1], left)
        ids = random.integers(1, VOCAB, int(lengths.sum()))
        ids[np.cumsum(lengths) - 1] = 0
        writer.add("train", ids, lengths)
        left -= len(ids)
    writer.finish(
        Index(
            dtype=dtype,
            vocab_size=VOCAB,
            document_end=0,
            tokenizer="none",
            tokenizer_sha256="0" * 64,
            field="text",
            eval_fraction=0.0,
            left_out=0,
            sources=(),
            shards=(),
        )
    )
    writer.close()
    return str(folder)


def read_rate(
    config: PreparedConfig, seq_len: int, seconds: float, repeats: int
) -> float:
    """Tokens for a second of CPU time, the median of some stretches after one that is not
    counted."""
    dataset = config.build(seq_len, VOCAB, 0)
    stream = BatchStream(dataset.train, BATCH, 1, range(1), 1, 0)
    packed = config.packing is Packing.best_fit  # whose padding is no token
    rates = []
    for _ in range(repeats + 1):
        started = time.process_time()
        tokens = 0
        while (took := time.process_time() - started) < seconds:
            for _tokens_BT, labels_BT in stream.next_step():
                tokens += int((labels_BT >= 0).sum()) if packed else labels_BT.numel()
        rates.append(tokens / took)
    return statistics.median(rates[1:])


def shuffle_microseconds(count: int = 10**9, places: int = 20_000) -> float:
    """Time per position of the order."""
    shuffle = EndlessShuffle(count, 0)
    started = time.process_time()
    for position in range(places):
        shuffle[position]
    return (time.process_time() - started) / places * 1e6


def train_tokenizer(path: Path, texts: list[str], vocab_size: int) -> None:
    """A byte-level BPE of some texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def prepare_seconds(
    folder: Path, files: list[str], tokenizer: str, processes: int, repeats: int
) -> tuple[float, float, int]:
    """Seconds, and those of CPU time of all processes, medians of some runs, and the ids that came
    out."""
    encoder = open_encoder(tokenizer, None, "tokenizer", "document_end")
    took: list[float] = []
    cpu: list[float] = []
    sources = find_sources("files", files)
    for number in range(repeats):
        request = Request(
            "files",
            sources,
            encoder,
            folder / f"{processes}-{number}",
            processes=processes,
        )
        started = time.perf_counter()
        before = _cpu_seconds()
        index = prepare_folder(request)
        took.append(time.perf_counter() - started)
        cpu.append(_cpu_seconds() - before)
    return statistics.median(took), statistics.median(cpu), index.tokens("train")


def _cpu_seconds() -> float:
    """Of this process and of those that have worked for it."""
    usage = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(resources.ru_utime + resources.ru_stime for resources in usage)


def stall_share(
    folder: str, run_dir: Path, workers: int, steps: int
) -> tuple[float, float]:
    """The stall share of a training of two ranks, and its median step in seconds."""
    overrides = [
        *(
            "experiment=cpu_text",
            "data=prepared",
            f"data.folder={folder}",
            f"data.workers={workers}",
        ),
        *(
            f"train.steps={steps}",
            "train.eval_every=0",
            "train.max_seconds=null",
            "checkpoint.every=0",
        ),
        *(
            "metrics.warmup_steps=5",
            "metrics.console=none",
            f"metrics.run_dir={run_dir}",
            "launch.device=cpu",
        ),
    ]
    subprocess.run(
        [sys.executable, "-m", "fsdptoys", "train", *overrides],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    results = read_recorded_run(run_dir).results
    assert results.data_stall is not None and results.step_time_seconds is not None
    return results.data_stall, results.step_time_seconds.median


def reading_table(folder: Path, args: argparse.Namespace) -> tuple[list[str], float]:
    """Rows of the reader, and the slowest of them in tokens for a second of CPU time."""
    doing("writing shards")
    narrow = write_shards(folder / "narrow", args.tokens, args.shards, wide=False)
    wide = write_shards(folder / "wide", args.tokens // 2, args.shards, wide=True)
    other = write_shards(folder / "other", args.tokens // 4, 1, wide=False)
    kinds = {
        "one folder, uint16": PreparedConfig(folder=narrow),
        "one folder, uint32": PreparedConfig(folder=wide),
        "two mixed 3:1, uint16": PreparedConfig(
            sources=[narrow, other], weights=[3.0, 1.0]
        ),
        "three mixed by size": PreparedConfig(sources=[narrow, wide, other]),
        "one folder, packed": PreparedConfig(
            folder=narrow, packing=Packing.best_fit, cache=str(folder / "cache")
        ),
    }
    assert len(kinds) == READING_KINDS
    lines = ["| data | seq_len | M tokens/CPU s |", "|---|---:|---:|"]
    slowest = float("inf")
    for name, config in kinds.items():
        for seq_len in args.seq_lens:
            with unit(f"reading, {name}, {seq_len}") as progress_unit:
                rate = read_rate(config, seq_len, args.seconds, args.repeats)
                progress_unit.note = f"{rate / 1e6:.0f} M tokens/CPU s"
            slowest = min(slowest, rate)
            lines.append(f"| {name} | {seq_len} | {rate / 1e6:.0f} |")
    return lines, slowest


def preparing_table(folder: Path, args: argparse.Namespace) -> list[str]:
    """Rows of tokenizing the standard library's source."""
    files = [source.path for source in find_sources("files", ["stdlib"])]
    texts = [Path(path).read_text(encoding="utf-8") for path in files[: args.files]]
    doing("training a tokenizer")
    train_tokenizer(folder / "tokenizer.json", texts[:100], args.vocab_size)
    size = sum(len(text.encode()) for text in texts)
    lines = [
        "| tokenizer | processes | MB of text/s | MB of text/CPU s | bytes an id |",
        "|---|---:|---:|---:|---:|",
    ]
    for tokenizer in ("bytes", str(folder / "tokenizer.json")):
        for processes in args.processes:
            target = folder / f"prepared-{Path(tokenizer).stem}"
            with unit(
                f"preparing, {Path(tokenizer).stem}, {processes} processes"
            ) as progress_unit:
                took, cpu, ids = prepare_seconds(
                    target, files[: args.files], tokenizer, processes, args.repeats
                )
                progress_unit.note = f"{size / took / 1e6:.1f} MB/s"
            name = "bytes" if tokenizer == "bytes" else f"BPE, {args.vocab_size} ids"
            rates = f"{size / took / 1e6:.1f} | {size / cpu / 1e6:.1f}"
            lines.append(f"| {name} | {processes} | {rates} | {size / ids:.2f} |")
    return lines


def waiting_table(folder: Path, args: argparse.Namespace) -> list[str]:
    """Rows of a training on the bytes of the standard library."""
    sources = find_sources("files", ["stdlib"])
    encoder = open_encoder("bytes", None, "", "")
    prepare_folder(Request("files", sources, encoder, folder / "text"))
    lines = [
        "| data.workers | median step, ms | waiting for data |",
        "|---:|---:|---:|",
    ]
    for workers in (0, 1):
        with unit(f"waiting, data.workers={workers}") as progress_unit:
            stall, step = stall_share(
                str(folder / "text"), folder / f"run{workers}", workers, args.steps
            )
            progress_unit.note = f"{stall:.2%}"
        lines.append(f"| {workers} | {step * 1e3:.0f} | {stall:.2%} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=2**26, help="of the largest folder"
    )
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a stretch of reading"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--files", type=int, default=10**6, help="of the standard library, to tokenize"
    )
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--steps", type=int, default=30, help="of the training; 0 for none"
    )
    parser.add_argument(
        "--write", type=Path, default=None, help="page to write the tables to"
    )
    args = parser.parse_args(argv)
    units = (
        READING_KINDS * len(args.seq_lens)
        + 2 * len(args.processes)
        + (2 if args.steps else 0)
    )
    with progress(units), tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reading, slowest = reading_table(folder, args)
        verdict = "reached" if slowest >= BAR else "MISSED"
        parts = [
            f"{machine('cpu', ['numpy', 'tokenizers'])}; medians of {args.repeats}.",
            "## Reading",
            "\n".join(reading),
            (
                f"Bar of {BAR / 1e6:.0f} M tokens/s on one core: {verdict}, {slowest / 1e6:.1f} at "
                f"the slowest. A place of the order costs {shuffle_microseconds():.1f} µs, of 10^9 "
                "samples."
            ),
            "## Preparing",
            "\n".join(preparing_table(folder, args)),
        ]
        if args.steps:
            parts += ["## Waiting", "\n".join(waiting_table(folder, args))]
    page = "\n\n".join(parts) + "\n"
    print(page)
    if args.write is not None:
        args.write.write_text(page, encoding="utf-8")
    return int(slowest < BAR)


if __name__ == "__main__":
    sys.exit(main())
