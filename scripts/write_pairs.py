"""Write two tables into ``docs/strategies.md``: what each strategy can do, and which settings
exclude one another.

    python scripts/write_pairs.py
    python scripts/write_pairs.py --check

The first has the ``capabilities`` of the configs in ``fsdptoys/parallel``. For the second, every
pair of ``SETTINGS`` is validated as a run on 8 CUDA devices under ``parallel=fsdp2``, with the
models, sizes and further settings that each of the two needs; nothing is allocated and no device is
touched.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import STRATEGIES
from fsdptoys.parallel.capabilities import REFUSALS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "strategies.md"
AXES = {
    "mesh.fsdp_size": "shards_parameters",
    "mesh.cp_size": "context_forms",
    "mesh.ep_size": "splits_experts",
    "mesh.tp_size": "splits_features",
    "mesh.pp_size": "splits_layers",
}
"""Mesh axis → the capability of strategies that have it."""
NEEDED = AXES | {
    "parallel.context=ring": "context_forms",
    "memory.offload_schedule=lazy": "optimizer_offload",
}
"""Setting → a capability that it needs beside its own."""
NAMES = {
    "optim.exchanges_matrices=true": "optim=muon",
    "optim.low_bit_format!=null": "optim.state_dtype=int8",
}
"""Facts about an optimizer → the setting that has them."""
RANKS = 8
BASE = (
    "experiment=null model=llama_debug model.n_layers=8 model.ffn_dim=192 parallel=fsdp2 "
    "train.seq_len=64"
)

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
    overrides = {
        word.partition("=")[0]: word for word in [*BASE.split(), *needed, *settings]
    }
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


def table_of_pairs() -> str:
    """Return the table of settings that exclude one another."""
    rows = [
        f"| `{first}` | `{second}` | {reason} |" for first, second, reason in pairs()
    ]
    return "\n".join(["| setting | not with | because |", "|---|---|---|", *rows])


def table_of_capabilities() -> str:
    """Return the table of strategies by mesh axes and switches."""
    columns = [config.capabilities for config in STRATEGIES.values()]
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in STRATEGIES)} |",
        f"|---|{':-:|' * len(columns)}",
    ]
    rows = [
        *(((axis,), capability) for axis, capability in AXES.items()),
        *(refusal[1::-1] for refusal in REFUSALS),
    ]
    for settings, capability in rows:
        needed = [
            capability,
            *(NEEDED[setting] for setting in settings if setting in NEEDED),
        ]
        marks = [
            "✓" if all(getattr(can, name) for name in needed) else "–"
            for can in columns
        ]
        label = "` with `".join(NAMES.get(setting, setting) for setting in settings)
        lines.append(f"| `{label}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def with_table(text: str, name: str, table: str) -> str:
    """Return a text with the table between its two comments."""
    start = f"<!-- {name}: python scripts/write_pairs.py -->\n"
    end = f"<!-- end of {name} -->\n"
    before, _, rest = text.partition(start)
    return f"{before}{start}\n{table}\n\n{end}{rest.partition(end)[2]}"


def page() -> str:
    """Return ``docs/strategies.md`` with its tables."""
    text = with_table(
        PAGE.read_text(encoding="utf-8"), "capabilities", table_of_capabilities()
    )
    return with_table(text, "pairs", table_of_pairs())


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
