"""Tokens a second with and without a key-value cache: ``python
scripts/benchmarks/bench_generate.py``.

A preset with random weights goes on greedily from a prompt of one token; both ways must give the
same tokens.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from fsdptoys.config.compose import compose_presets
from fsdptoys.models import DecoderModel
from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel import seeded
from scripts.common.machine import machine
from scripts.common.progress import progress, unit


@torch.no_grad()
def generate_without(model: DecoderModel, prompt_T: Tensor, count: int) -> Tensor:
    """Read all tokens again for each."""
    tokens_T = prompt_T
    for _ in range(count):
        tokens_T = torch.cat([tokens_T, model(tokens_T.unsqueeze(0))[0, -1:].argmax(-1)])
    return tokens_T


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_bytes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    (config,) = compose_presets([args.model])
    model = config.build().eval()
    model.init_buffers(torch.device("cpu"))
    fill = seeded(model.init_rows, 0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(param, name)
    prompt_T = torch.tensor([1])
    greedy = Draw(temperature=0.0)
    print(f"{machine('cpu')}; {args.model}, float32, medians of {args.repeats}\n")
    print("| tokens added | with a cache, tokens/s | without, tokens/s |\n|---|---|---|")
    with progress(len(args.lengths) * 2 * args.repeats):
        for count in args.lengths:
            ways: list[Callable[[], Tensor]] = [
                lambda count=count: generate(model, prompt_T, count, config.max_seq_len, greedy),
                lambda count=count: generate_without(model, prompt_T, count),
            ]
            texts, rates = [], []
            for number, way in enumerate(ways):
                seconds = []
                for turn in range(args.repeats):
                    with unit(
                        f"{count} tokens {('with', 'without')[number]} a cache, turn {turn + 1}"
                    ):
                        started = time.perf_counter()
                        tokens_T = way()
                        seconds.append(time.perf_counter() - started)
                texts.append(tokens_T.tolist())
                rates.append(count / statistics.median(seconds))
            assert texts[0] == texts[1]
            print(f"| {count} | {rates[0]:.0f} | {rates[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
