"""Non-tensor state ("facts") of a checkpoint: ``state.json`` for all ranks, ``rank-00000.json`` for one.

Checksums prove that these files are unchanged, but not which version wrote them. So the caller passes a dataclass of
types and ranges, which the facts are checked against when they are read.
"""

from dataclasses import dataclass
from typing import Any

from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import build

from .manifest import MANIFEST_FILE, STATE_FILE, InvalidCheckpointError, Manifest, read_facts, step_of, world_size_of
from .storage import Storage

Facts = dict[str, Any]


@dataclass(frozen=True)
class Schema:
    """Dataclasses with the types and ranges of facts (``utils.from_tree``); None accepts any facts."""

    state: type | None = None
    """Common facts, without ``step`` and ``world_size``."""
    own: type | None = None
    """Facts of one rank."""


ANY = Schema()


def read_state(storage: Storage, manifest: Manifest, schema: Schema) -> Facts:
    """Read the facts common to all ranks.

    Raises:
        InvalidCheckpointError: if the file is damaged or does not fit the schema.
        UnreadableError: if the system fails to read it.
    """
    facts = read_facts(storage, manifest, STATE_FILE)
    step, ranks = facts.get("step"), facts.get("world_size")
    if type(step) is not int or step != step_of(manifest.name):
        raise InvalidCheckpointError(f"is damaged: {STATE_FILE} is that of step {step!r:.100}")
    if type(ranks) is not int or ranks != world_size_of(manifest):
        raise InvalidCheckpointError(
            f"is damaged: {STATE_FILE} is that of {ranks!r:.100} ranks, and {MANIFEST_FILE} lists files of "
            f"{world_size_of(manifest)}"
        )
    return _checked(facts, STATE_FILE, schema.state)


def read_own(storage: Storage, manifest: Manifest, path: str, schema: Schema) -> Facts:
    """Read the facts of one rank; errors as ``read_state``."""
    return _checked(read_facts(storage, manifest, path), path, schema.own)


def _checked(facts: Facts, path: str, schema: type | None) -> Facts:
    try:
        if schema is not None:
            build(schema, facts, skip_unknown=True)
    except ForeignError as error:
        raise InvalidCheckpointError(f"holds facts that this version does not read ({path}: {error})") from error
    return facts
