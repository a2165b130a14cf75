"""JSON instead of pickle for torch's object collectives.

``broadcast_object_list``, ``gather_object`` and similar, called here, by FSDP1, or by
torch.distributed.checkpoint in a user's own code, send pickles, which can run code when loaded. The
peers' addresses come from a store without authentication, so an attacker could pose as a rank.
``use_json`` makes torch send plain values and the fields of instances of a few known classes
instead. Decoding creates instances of these classes only, and calls none of their methods. It takes
several times as long as pickle.

An exception of any other class arrives as its nearest builtin base class, with the original class
in the message.
"""

import base64
import builtins
import dataclasses
import enum
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed import distributed_c10d

from fsdptoys.utils.foreign import ForeignError, parse_json

MAX_DEPTH = 200
"""Maximum nesting of JSON lists; each object takes several levels."""

_TORCH_MODULES = (
    *(
        f"torch.distributed.checkpoint.{name}"
        for name in ("filesystem", "metadata", "planner", "storage")
    ),
    "torch.distributed.fsdp._optim_utils",  # FSDP1's optimizer states
)
_MORE_THAN_TEXT = (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)

_bytes = functools.partial(base64.b64decode, validate=True)


class WireError(RuntimeError):
    """Received bytes are not valid, or an object cannot be encoded."""


class JsonWriter:
    """Replaces ``pickle.Pickler`` in torch."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        """Write a value; WireError for an object of an unknown class."""
        self._file.write(json.dumps(_plain(value), separators=(",", ":")).encode())


class JsonReader:
    """Replaces ``pickle.Unpickler`` in torch."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def load(self) -> Any:
        """Read a value; WireError for anything that ``JsonWriter`` cannot write."""
        try:
            return _value(
                parse_json(self._file.read(), max_depth=MAX_DEPTH, non_finite=True)
            )
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RuntimeError,
        ) as error:
            raise WireError(
                f"a rank received an object that no rank of this run has sent ({error})"
            ) from None


def use_json() -> None:
    """Make torch's object collectives in this process write and read JSON.

    Replaces the private ``_pickler`` and ``_unpickler`` of distributed_c10d (tested with torch
    2.13; 2.7 has both), and checks that torch's functions look these names up, so that no version
    can silently use pickle: WireError otherwise.
    """
    module: Any = distributed_c10d
    module._pickler = JsonWriter
    module._unpickler = JsonReader
    # Reads their code, since a call needs a process group on CUDA with
    # TORCH_DISTRIBUTED_DEBUG=DETAIL.
    writes = module._object_to_tensor.__code__.co_names
    reads = module._tensor_to_object.__code__.co_names
    if "_pickler" not in writes or "_unpickler" not in reads:
        raise WireError(
            f"torch {torch.__version__} sends pickles between ranks; use torch 2.7 to 2.15"
        )


def _plain(value: Any) -> Any:
    """Convert to lists, strings and numbers: plain values stay, all others become ``[kind, …]``."""
    kind = type(value)
    if (
        kind is int
        or kind is bool
        or value is None
        or kind is float
        or (kind is str and value.isascii())
    ):
        return value
    if kind not in _ENCODERS:
        _ENCODERS[kind] = _find_encoder(kind)
    return _ENCODERS[kind](value)


def _find_encoder(kind: Any) -> Callable[[Any], list[Any]]:
    if issubclass(kind, BaseException):
        return _plain_error
    if not _is_known(kind):
        raise WireError(
            f"an object of {kind.__module__}.{kind.__qualname__} cannot be sent between ranks"
        )
    if issubclass(kind, enum.Enum):
        return lambda value: ["enum", kind.__module__, kind.__qualname__, value.name]
    head = ["object", kind.__module__, kind.__qualname__]
    names = _fields(kind)
    return lambda value: [
        *head,
        *[
            [name, _plain(getattr(value, name))]
            for name in names
            if hasattr(value, name)
        ],
    ]


def _plain_stack(stack: traceback.StackSummary) -> list[Any]:
    frames = [
        [frame.filename, frame.lineno or 0, frame.name, frame.line or ""]
        for frame in stack
    ]
    return ["stack", *map(_plain, frames)]


def _plain_tensor(tensor: torch.Tensor) -> list[Any]:
    """Encode a small tensor, which arrives on the CPU."""
    numbers = tensor.detach().cpu().contiguous()
    content = numbers.reshape(-1).view(torch.uint8).numpy().tobytes()
    return ["tensor", _plain(tensor.dtype), list(tensor.shape), _encode_bytes(content)]


def _encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


_ENCODERS: dict[Any, Callable[[Any], list[Any]]] = {
    list: lambda value: ["list", *map(_plain, value)],
    tuple: lambda value: ["tuple", *map(_plain, value)],
    set: lambda value: ["set", *map(_plain, value)],
    frozenset: lambda value: ["frozenset", *map(_plain, value)],
    torch.Size: lambda value: ["Size", *value],
    dict: lambda value: [
        "dict",
        *[[_plain(key), _plain(item)] for key, item in value.items()],
    ],
    bytes: lambda value: ["bytes", _encode_bytes(value)],
    type(Path()): lambda value: ["path", _plain(str(value))],
    torch.Tensor: _plain_tensor,
    # Names of files are not all UTF-8, and have no form in JSON then.
    str: lambda value: ["text", _encode_bytes(value.encode("utf-8", "surrogatepass"))],
    traceback.StackSummary: _plain_stack,
    **{
        kind: lambda value: ["torch", str(value).removeprefix("torch.")]
        for kind in _NAMED
    },
}


def _plain_error(error: Any) -> list[Any]:
    kind: type[BaseException] = type(error)
    if (
        kind.__name__ == "CheckpointException"
        and kind.__module__ == "torch.distributed.checkpoint.api"
    ):
        return ["failures", _plain(str(error.args[0])), _plain(error.failures)]
    if isinstance(error, OSError) and error.errno is not None:
        path = error.filename if isinstance(error.filename, str) else None
        return [
            "os error",
            error.errno,
            _plain(error.strerror or str(error)),
            _plain(path),
        ]
    if _is_own_error(kind):
        return ["error", kind.__module__, kind.__name__, _plain(str(error))]
    builtin = (base for base in kind.__mro__ if base.__module__ == "builtins")
    base = next(base for base in builtin if not issubclass(base, _MORE_THAN_TEXT))
    name = "" if base is kind else f"{kind.__module__}.{kind.__qualname__}: "
    return ["error", "builtins", base.__name__, _plain(f"{name}{error}")]


def _value(plain: Any) -> Any:
    if type(plain) is not list:
        if type(plain) is dict:
            raise ForeignError("it holds an object")
        return plain
    return _DECODERS[plain[0]](*plain[1:])


def _tensor(dtype: Any, shape: Any, content: str) -> torch.Tensor:
    numbers = bytearray(_bytes(content))
    flat = (
        torch.frombuffer(numbers, dtype=_value(dtype))
        if numbers
        else torch.empty(0, dtype=_value(dtype))
    )
    return flat.reshape(shape)


def _named_of_torch(name: str) -> Any:
    constant = getattr(torch, name)
    if not isinstance(constant, _NAMED):
        raise ForeignError("it names something else of torch")
    return constant


def _stack(*frames: Any) -> traceback.StackSummary:
    entries = [
        (str(file), int(line), str(name), str(text))
        for file, line, name, text in map(_value, frames)
    ]
    return traceback.StackSummary.from_list(entries)


def _member(module: str, name: str, member: str) -> Any:
    kind, _ = _known_class(module, name)
    if not issubclass(kind, enum.Enum):
        raise ForeignError("it names no enumeration")
    return kind[member]


def _instance(module: str, name: str, *fields: Any) -> Any:
    kind, names = _known_class(module, name)
    values = {key: _value(plain) for key, plain in fields}
    if issubclass(kind, enum.Enum) or not values.keys() <= names:
        raise ForeignError("it has other fields")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [values[key] for key in _fields(kind)])
    instance = object.__new__(kind)
    for key, value in values.items():
        object.__setattr__(instance, key, value)
    return instance


def _failures(message: Any, failures: Any) -> BaseException:
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException(str(_value(message)), _value(failures))


def _os_error(number: Any, text: Any, path: Any) -> OSError:
    return OSError(
        int(number),
        str(_value(text)),
        *([str(_value(path))] if path is not None else []),
    )


def _error(module: str, name: str, message: Any) -> BaseException:
    kind = getattr(builtins if module == "builtins" else _loaded(module), name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ForeignError("it names no exception")
    if module != "builtins" and not _is_own_error(kind):
        raise ForeignError("it names another exception")
    error: BaseException = kind.__new__(kind, str(_value(message)))
    error.args = (str(_value(message)),)
    return error


def _is_own_error(kind: type) -> bool:
    """Whether a class is an exception of this package with no state besides its message."""
    is_ours = kind.__module__.startswith("fsdptoys.")
    return is_ours and not issubclass(kind, OSError) and "__init__" not in vars(kind)


def _is_known(kind: Any) -> bool:
    """Whether a class holds plain data only, and may be created from untrusted input."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_plain = (
        dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum) or is_named_tuple
    )
    return _is_allowed(kind.__module__) and is_plain


def _is_allowed(module: Any) -> bool:
    return isinstance(module, str) and (
        module in _TORCH_MODULES or module.startswith("fsdptoys.")
    )


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(
        kind._fields
        if issubclass(kind, tuple)
        else (field.name for field in dataclasses.fields(kind))
    )


def _loaded(module: Any) -> Any:
    """An allowed module, imported already; untrusted input never causes an import."""
    if not _is_allowed(module):
        raise ForeignError("it names another module")
    return sys.modules[module]


@functools.cache
def _known_class(module: Any, name: Any) -> tuple[Any, frozenset[str]]:
    """Return a known class and the names of its fields."""
    kind = vars(_loaded(module))[name]
    if not (isinstance(kind, type) and kind.__module__ == module and _is_known(kind)):
        raise ForeignError("it names another class")
    return kind, frozenset() if issubclass(kind, enum.Enum) else frozenset(
        _fields(kind)
    )


_DECODERS: dict[str, Callable[..., Any]] = {
    "list": lambda *items: [_value(item) for item in items],
    "tuple": lambda *items: tuple([_value(item) for item in items]),
    "set": lambda *items: {_value(item) for item in items},
    "frozenset": lambda *items: frozenset([_value(item) for item in items]),
    "Size": lambda *lengths: torch.Size(lengths),
    "dict": lambda *pairs: {_value(key): _value(item) for key, item in pairs},
    "bytes": _bytes,
    "text": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "path": lambda text: Path(str(_value(text))),
    "tensor": _tensor,
    "torch": _named_of_torch,
    "stack": _stack,
    "failures": _failures,
    "os error": _os_error,
    "error": _error,
    "enum": _member,
    "object": _instance,
}
