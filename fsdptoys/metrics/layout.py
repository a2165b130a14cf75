"""Sizes of a run before its first step, printed at the start and kept in the results: parameters,
units, mesh, bytes.

Numbers of a rank are the largest over all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.utils.text import size_text


@dataclass(frozen=True)
class Unit:
    """Parameters that one all-gather collects."""

    name: str
    parameters: int
    gathered_bytes: int
    """Of the full parameters, in the dtype of forward and backward."""


@dataclass(frozen=True)
class RankBytes:
    """Tensors of one purpose on one rank."""

    device: int
    """Bytes in device memory."""
    host: int
    """Bytes offloaded to host memory."""


@dataclass(frozen=True)
class Layout:
    """How a run's model lies on its ranks."""

    parameters: int
    """A shared weight counts once."""
    parameters_per_rank: int
    """With the padding of uneven shards."""
    units: int
    """0 where every rank keeps all parameters."""
    largest_unit: Unit | None
    smallest_unit: Unit | None
    mesh: dict[str, int]
    """Axis → ranks, without axes of one rank."""
    sharded: str
    """Tensors that are sharded over the shard axis."""
    bytes_per_rank: dict[str, RankBytes]
    """Parameters, gradients once all are reduced, and optimizer states."""
    trained: int | None = None
    """Those of ``parameters`` that are not frozen; None in results of versions without frozen
    ones."""


def layout_rows(layout: Layout) -> list[tuple[str, str]]:
    """Labels and texts of the lines on the console and in the summary."""
    trained = layout.trained if layout.trained is not None else layout.parameters
    share = f"{trained:,} ({trained / layout.parameters:.2%}) train and " * (
        trained < layout.parameters
    )
    rows = [
        (
            "parameters",
            f"{layout.parameters:,}, of which {share}a rank holds {layout.parameters_per_rank:,}",
        )
    ]
    largest = layout.largest_unit
    smallest = layout.smallest_unit
    if largest is not None and smallest is not None:
        rows.append(
            (
                "units",
                f"{layout.units}; largest {_unit_text(largest)}, smallest {_unit_text(smallest)}",
            )
        )
    rows.append(("mesh", _mesh_text(layout)))
    parts = ", ".join(
        f"{name} {_bytes_text(rank_bytes)}"
        for name, rank_bytes in layout.bytes_per_rank.items()
    )
    return [*rows, ("bytes per rank", parts)]


def layout_lines(rows: Sequence[tuple[str, str]]) -> str:
    """The rows as lines, with the texts aligned."""
    return "\n".join(f"{label:<16}{text}" for label, text in rows)


def _unit_text(unit: Unit) -> str:
    return (
        f"{unit.name} ({unit.parameters:,} parameters, "
        f"{size_text(unit.gathered_bytes)} gathered)"
    )


def _mesh_text(layout: Layout) -> str:
    mesh = dict(layout.mesh)
    # Both are among the ranks of the other axes.
    sharing = mesh.pop("cp", 1)
    splits = mesh.pop("ep", 1)
    axes = " × ".join(f"{axis}={ranks}" for axis, ranks in mesh.items())
    shards = mesh.get("shard")
    replicas = mesh.get("replicate")
    shared = f"; cp={sharing}: each sequence shared by {sharing} ranks" * (sharing > 1)
    if shards is None:
        return (
            f"{axes}: {replicas} ranks with full copies{shared}"
            if replicas
            else "one rank"
        )
    split = (
        f"{layout.sharded} split over {shards} ranks"
        + f", experts over ep={splits} of them" * (splits > 1)
    )
    return f"{axes}: {f'{replicas} copies, each with ' * bool(replicas)}{split}{shared}"


def _bytes_text(rank_bytes: RankBytes) -> str:
    on_host = f"{size_text(rank_bytes.host)} in host memory"
    if rank_bytes.host and rank_bytes.device:
        return f"{size_text(rank_bytes.device)} and {on_host}"
    return on_host if rank_bytes.host else size_text(rank_bytes.device)
