"""The exceptions behind an exception: PyTorch's pipelines, compiler, checkpointing and threads wrap those they meet."""

from collections.abc import Iterator


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from or while handling, the outermost first."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop(0)
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [found.__cause__, found.__context__]
