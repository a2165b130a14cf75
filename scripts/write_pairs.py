"""Write the table of settings that exclude one another into ``docs/strategies.md``.

    python scripts/write_pairs.py
    python scripts/write_pairs.py --check

Every pair of ``SETTINGS`` is validated as a run on 8 CUDA devices under ``parallel=fsdp2``, with the models, sizes and
further settings that each of the two needs; nothing is allocated and no device is touched.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "strategies.md"
START, END = "<!-- pairs: python scripts/write_pairs.py -->\n", "<!-- end of pairs -->\n"
RANKS = 8
BASE = "experiment=null model=llama_debug model.n_layers=8 model.ffn_dim=192 parallel=fsdp2 train.seq_len=64"

SETTINGS = {
    "mesh.fsdp_size=4": "",
    "mesh.tp_size=2": "",
    "mesh.pp_size=2": "train.grad_accum=2",
    "mesh.cp_size=2": "",
    "mesh.ep_size=2": "model=qwen3_moe_debug",
    "memory.gradient_checkpointing=full": "",
    "memory.gradient_checkpointing=selective": "",
    "memory.activation_offload=true": "memory.gradient_checkpointing=full",
    "memory.chunk_loss=true": "",
    "memory.optimizer_offload=true": "",
    "memory.cpu_offload=true": "",
    "memory.optimizer_in_backward=true": "train.max_grad_norm=null train.skip_nonfinite=false",
    "train.compile=true": "",
    "train.float8=tensorwise": "parallel.param_dtype=bfloat16",
    "parallel.param_dtype=float16": "",
    "train.deterministic=true": "",
    "train.deterministic=layout": "",
    "optim=muon": "",
    "optim.state_dtype=int8": "",
    "tune=lora": "",
    "tune.base=nf4": "tune=lora",
    "data.mask_documents=true": "",
    "parallel.reduce_each_microbatch=true": "train.grad_accum=2",
}
"""Setting → what else it needs."""


def refusal(*settings: str) -> str | None:
    """Return the sentence against settings; None if they go together."""
    needed = [word for setting in settings for word in SETTINGS[setting].split()]
    if {"mesh.tp_size=2", "train.deterministic=layout"} <= set(settings):
        needed.append("train.slices=2")
    overrides = {word.partition("=")[0]: word for word in [*BASE.split(), *needed, *settings]}
    try:
        compose_config(list(overrides.values())).validate(RANKS, "cuda")
    except ConfigError as error:
        return str(error)
    return None


def pairs() -> Iterator[tuple[str, str, str]]:
    """Yield two settings that exclude one another, and the reason.

    Raises:
        RuntimeError: if a setting is refused alone.
    """
    for setting in SETTINGS:
        if alone := refusal(setting):
            raise RuntimeError(alone)
    for first, second in itertools.combinations(SETTINGS, 2):
        same_key = first.partition("=")[0] == second.partition("=")[0]
        implied = first in SETTINGS[second].split()
        if not same_key and not implied and (sentence := refusal(first, second)):
            yield first, second, sentence.rpartition("; ")[0]


def page() -> str:
    """Return ``docs/strategies.md`` with the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    rows = [f"| `{first}` | `{second}` | {reason} |" for first, second, reason in pairs()]
    table = "\n".join(["| setting | not with | because |", "|---|---|---|", *rows])
    return f"{before}{START}\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Write the page, or check it with ``--check``."""
    text = page()
    stale = text != PAGE.read_text(encoding="utf-8")
    if stale:
        print(f"{PAGE.name} {'is out of date' if '--check' in sys.argv else 'written'}")
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    return int(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
