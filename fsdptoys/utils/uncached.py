"""An argument that a cache ignores."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Uncached(Generic[T]):
    """An argument that ``lru_cache`` ignores because another one, its key, identifies it."""

    value: T = field(compare=False)
