"""The exceptions behind an exception: PyTorch's pipelines, compiler, checkpointing and threads wrap
those they meet."""

from collections.abc import Iterator


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from or while handling, the outermost
    first."""
    waiting: list[BaseException | None] = [error]
    identities: set[int] = set()
    while waiting:
        cause = waiting.pop(0)
        if cause is not None and id(cause) not in identities:
            identities.add(id(cause))
            yield cause
            waiting += [cause.__cause__, cause.__context__]
