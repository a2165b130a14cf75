"""The rows of a verification: a layout with its memory switches each, against the plain loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import suggestion

MOST_RANKS = 8
USUAL_RANKS = 4


@dataclass(frozen=True)
class Row:
    """One way to train the model."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    usual: bool = True
    """Whether it is among the rows without ``--rows``."""
    saved_by: tuple[int, str] | None = None
    """Ranks and overrides, separated by spaces, of the run that saved a checkpoint from which this
    one resumes."""

    def overrides_text(self) -> str:
        """The overrides as typed; those of the saving run first."""
        text = " ".join(self.overrides)
        if self.saved_by is None:
            return text
        ranks, overrides = self.saved_by
        return f"saved with {overrides} on {ranks} ranks, resumed with {text}"

    def settings(self) -> dict[str, str]:
        """Key → value of its overrides."""
        pairs = (word.partition("=") for word in self.overrides)
        return {key: value for key, _, value in pairs}


def _row(
    name: str,
    ranks: int,
    overrides: str,
    saved_by: tuple[int, str] | None = None,
    *,
    usual: bool = True,
) -> Row:
    return Row(name, ranks, tuple(overrides.split()), usual, saved_by)


def _further(name: str, ranks: int, overrides: str) -> Row:
    return _row(name, ranks, overrides, usual=False)


ACCUMULATES = "train.grad_accum=2"
CHECKPOINTS = "memory.gradient_checkpointing=full"
BF16 = "parallel.param_dtype=bfloat16"
DETERMINISTIC = "train.deterministic=true"

ROWS = {
    row.name: row
    for row in (
        _row("single", 1, "parallel=single"),
        _row("single-accum", 1, f"parallel=single {ACCUMULATES}"),
        _row("ddp", 2, "parallel=ddp"),
        _row("ddp-accum", 2, f"parallel=ddp {ACCUMULATES}"),
        _row("fsdp1", 2, "parallel=fsdp1"),
        _further("fsdp1-accum", 2, f"parallel=fsdp1 {ACCUMULATES}"),
        _further("fsdp1-4", 4, "parallel=fsdp1"),
        _further("hsdp1", 4, "parallel=fsdp1 mesh.fsdp_size=2"),
        _row("fsdp2", 2, "parallel=fsdp2"),
        _row("fsdp2-accum", 2, f"parallel=fsdp2 {ACCUMULATES}"),
        _row("fsdp2-3", 3, "parallel=fsdp2"),
        _row("fsdp2-4", 4, "parallel=fsdp2"),
        _further("fsdp2-8", 8, "parallel=fsdp2"),
        _row("hsdp", 4, "parallel=fsdp2 mesh.fsdp_size=2"),
        _further("hsdp-accum", 4, f"parallel=fsdp2 mesh.fsdp_size=2 {ACCUMULATES}"),
        _further("zero2", 2, "parallel=fsdp2 parallel.reshard_after_forward=never"),
        _further("units", 2, "parallel=fsdp2 parallel.min_params=10000"),
        _row("fsdp2-exact", 4, f"parallel=fsdp2 {DETERMINISTIC}"),
        _row("hsdp-exact", 4, f"parallel=fsdp2 mesh.fsdp_size=2 {DETERMINISTIC}"),
        _further("ddp-exact", 4, f"parallel=ddp {DETERMINISTIC}"),
        _further("fsdp1-exact", 4, f"parallel=fsdp1 {DETERMINISTIC}"),
        _row("checkpointing", 2, f"parallel=fsdp2 {CHECKPOINTS}"),
        _row("selective", 2, "parallel=fsdp2 memory.gradient_checkpointing=selective"),
        _row("chunked-loss", 2, "parallel=fsdp2 memory.chunk_loss=true"),
        _row("optimizer-offload", 2, "parallel=fsdp2 memory.optimizer_offload=true"),
        _further(
            "lazy-offload",
            2,
            "parallel=fsdp2 memory.optimizer_offload=true memory.offload_schedule=lazy",
        ),
        _row("cpu-offload", 2, "parallel=fsdp2 memory.cpu_offload=true"),
        _further(
            "in-backward",
            2,
            "parallel=fsdp2 memory.optimizer_in_backward=true "
            "train.max_grad_norm=null train.skip_nonfinite=false",
        ),
        _row(
            "all-switches",
            4,
            f"parallel=fsdp2 {CHECKPOINTS} memory.chunk_loss=true "
            f"memory.optimizer_offload=true {ACCUMULATES}",
        ),
        _row("tp", 2, "parallel=fsdp2 mesh.tp_size=2"),
        _further("tp-fsdp2", 4, "parallel=fsdp2 mesh.tp_size=2"),
        _row("cp-ulysses", 2, "parallel=fsdp2 mesh.cp_size=2 parallel.context=ulysses"),
        _row(
            "cp-gathered", 2, "parallel=fsdp2 mesh.cp_size=2 parallel.context=gathered"
        ),
        _row("cp-ring", 2, "parallel=fsdp2 mesh.cp_size=2 parallel.context=ring"),
        _further("cp-4", 4, "parallel=fsdp2 mesh.cp_size=4 parallel.context=gathered"),
        _row("ep", 2, "parallel=fsdp2 mesh.ep_size=2"),
        _further("ep-4", 4, "parallel=fsdp2 mesh.ep_size=4"),
        _further("cp-ep", 4, "parallel=fsdp2 mesh.cp_size=2 mesh.ep_size=2"),
        _further("tp-ep", 4, "parallel=fsdp2 mesh.tp_size=2 mesh.ep_size=2"),
        _further("tp-cp", 4, "parallel=fsdp2 mesh.tp_size=2 mesh.cp_size=2"),
        _row("pp", 2, f"parallel=fsdp2 mesh.pp_size=2 {ACCUMULATES}"),
        *(
            _further(
                f"pp-{schedule}",
                2,
                f"parallel=fsdp2 mesh.pp_size=2 {ACCUMULATES} "
                f"parallel.schedule={schedule}",
            )
            for schedule in ("1f1b", "interleaved", "zero_bubble")
        ),
        _further("pp-fsdp2", 4, f"parallel=fsdp2 mesh.pp_size=2 {ACCUMULATES}"),
        _row(
            "resume",
            4,
            "parallel=fsdp2 mesh.fsdp_size=2",
            saved_by=(2, "parallel=fsdp2"),
        ),
        _row(
            "resume-switches",
            2,
            f"parallel=ddp {CHECKPOINTS}",
            saved_by=(4, "parallel=fsdp2 memory.optimizer_offload=true"),
            usual=False,
        ),
        _row("bf16-single", 1, f"parallel=single {BF16}"),
        _row("bf16-ddp", 2, f"parallel=ddp {BF16}"),
        _row("bf16-fsdp2", 2, f"parallel=fsdp2 {BF16}"),
        _further("bf16-fsdp1", 2, f"parallel=fsdp1 {BF16}"),
        _further("bf16-tp", 2, f"parallel=fsdp2 mesh.tp_size=2 {BF16}"),
        _further("bf16-cp", 2, f"parallel=fsdp2 mesh.cp_size=2 {BF16}"),
        *(
            _further(f"toy-{name}", 2, f"parallel=toy_{name}")
            for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        ),
        _further("compile", 2, "parallel=fsdp2 train.compile=true"),
    )
}
"""Name → row, in the order of the table."""


@dataclass(frozen=True)
class Selection:
    """Rows to train, and those left out."""

    rows: list[Row]
    left_out: dict[str, str]
    """Name of a row that was asked for → the reason."""


def select_rows(names: str, ranks: int, fixed: Sequence[str]) -> Selection:
    """Return the rows to train.

    Args:
        names: separated by commas; ``usual`` and ``all`` stand for several.
        ranks: most that a row may have.
        fixed: overrides of the command line. A row that sets one of their keys to another value is
            left out.

    Raises:
        ConfigError: for an unknown name, or if no row is left.
    """
    chosen: dict[str, Row] = {}
    for name in names.split(","):
        if name in ("usual", "all"):
            chosen |= {
                row.name: row for row in ROWS.values() if row.usual or name == "all"
            }
        elif name in ROWS:
            chosen[name] = ROWS[name]
        else:
            fix = suggestion(name, [*ROWS, "usual", "all"], f"names: {', '.join(ROWS)}")
            raise ConfigError(f"--rows {name} is not a row of fsdptoys verify; {fix}")
    values = dict(word.partition("=")[::2] for word in fixed)
    left_out: dict[str, str] = {}
    for name, row in chosen.items():
        other = [
            f"{key}={value}"
            for key, value in row.settings().items()
            if values.get(key, value) != value
        ]
        if row.ranks > ranks:
            left_out[name] = f"{row.ranks} ranks are more than {ranks}"
        elif other:
            left_out[name] = f"these set {other[0]}"
    rows = [row for row in ROWS.values() if row.name in chosen.keys() - left_out.keys()]
    if not rows:
        name, reason = next(iter(left_out.items()))
        raise ConfigError(
            f"--rows {names} leaves nothing to train: {name} is left out, as {reason}; name "
            "other rows, or leave out settings"
        )
    return Selection(rows, left_out)
