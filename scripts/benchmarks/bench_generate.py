"""Tokens a second with and without a key-value cache: ``python
scripts/benchmarks/bench_generate.py``.

A preset with random weights goes on greedily from a prompt of one token; both ways must give the
same tokens.
"""

import functools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from fsdptoys.config.compose import compose_presets
from fsdptoys.models import DecoderModel
from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel import seeded
from fsdptoys.utils.tables import markdown_table
from scripts.common.machine import machine
from scripts.common.page import page_parser, publish
from scripts.common.progress import progress, unit


@torch.no_grad()
def generate_without(model: DecoderModel, prompt_T: Tensor, count: int) -> Tensor:
    """Read all tokens again for each."""
    tokens_T = prompt_T
    for _ in range(count):
        tokens_T = torch.cat(
            [tokens_T, model(tokens_T.unsqueeze(0))[0, -1:].argmax(-1)]
        )
    return tokens_T


def main() -> None:
    """Print a row for each length."""
    parser = page_parser(__doc__)
    parser.add_argument("--model", default="llama_bytes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    (config,) = compose_presets([args.model])
    model = config.build().eval()
    model.init_buffers(torch.device("cpu"))
    fill = seeded(model.row_initializer(), 0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(param, name)
    ways = {
        "with": functools.partial(
            generate, model, context=config.max_seq_len, draw=Draw(temperature=0.0)
        ),
        "without": functools.partial(generate_without, model),
    }
    rows = [["tokens added", "with a cache, tokens/s", "without, tokens/s"]]
    with progress(len(args.lengths) * len(ways) * args.repeats):
        for count in args.lengths:
            texts = []
            rates = []
            for name, way in ways.items():
                seconds = []
                for turn in range(args.repeats):
                    with unit(f"{count} tokens {name} a cache, turn {turn + 1}"):
                        started = time.perf_counter()
                        tokens_T = way(prompt_T=torch.tensor([1]), count=count)
                        seconds.append(time.perf_counter() - started)
                texts.append(tokens_T.tolist())
                rates.append(f"{count / statistics.median(seconds):.0f}")
            assert texts[0] == texts[1]
            rows.append([str(count), *rates])
    title = f"{machine('cpu')}; {args.model}, float32, medians of {args.repeats}"
    publish(f"{title}\n\n{markdown_table(rows)}", args.write)


if __name__ == "__main__":
    main()
