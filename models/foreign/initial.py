"""Initial values of a model of transformers, recorded from its own initialization.

``initialize_weights`` of transformers cannot fill shards: every rank would draw the same rows. So
it runs on the meta device, where a ``Recorder`` keeps the operations that it applies to each
parameter, and these are applied to blocks of rows that this project seeds by name
(``fsdptoys.parallel.init_weights``): the same values on every layout. They have the distributions
of transformers, not its numbers for the same seed.

Some families set a few small parameters to a computed value (``A_log``, ``dt_bias``). These are
computed by the family's code on a copy of their module, from the same seed.

Not covered: other operations than those below on a full parameter, or on parts other than rows set
to zero; such parameters are named, and need ``model.init_from``.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..decoder import RowInitializer
from .buffers import initializers_of

FIRST = ("normal_", "uniform_", "zero_", "fill_")
"""Operations that write every element."""
FURTHER = ("mul_", "add_", "clamp_", "erfinv_")
"""Operations on values written before."""
DRAWS = ("normal_", "uniform_")
MOST_COPIED = 2**22
"""Elements of the largest parameter with a computed value, a block of rows."""


@dataclass
class Program:
    """How transformers initializes one parameter."""

    steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    """Names and arguments of operations in place."""
    zero_rows: list[int] = field(default_factory=list)
    """Rows set to zero afterwards."""
    is_computed: bool = False
    """Whether a computed value is copied into it."""
    unknown: str | None = None
    """The first operation that cannot be repeated."""

    @property
    def problem(self) -> str | None:
        """Why the values cannot be made; None if they can."""
        if self.unknown is not None:
            return f"{self.unknown} initializes it"
        if not self.steps and not self.is_computed:
            return "transformers does not initialize it"
        return None


class Recorder(TorchDispatchMode):
    """Records operations in place on parameters, which are known by their storage."""

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.written_buffers: list[Tensor] = []
        self._buffers = {buffer.untyped_storage()._cdata: buffer for buffer in buffers}
        self.programs = {name: Program() for name in parameters}
        self._of = {
            param.untyped_storage()._cdata: (name, param)
            for name, param in parameters.items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name.split("::")[1]
        if args and isinstance(args[0], Tensor) and operation.endswith("_"):
            named_param = self._of.get(args[0].untyped_storage()._cdata)
            if named_param is not None:
                self._record(*named_param, operation, args, kwargs or {})
            buffer = self._buffers.get(args[0].untyped_storage()._cdata)
            if buffer is not None:
                self.written_buffers.append(buffer)
        return result

    def _record(
        self,
        name: str,
        param: Tensor,
        operation: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        target: Tensor = args[0]
        program = self.programs[name]
        rest = args[1:]
        if operation in ("detach_", "requires_grad_"):
            return
        is_whole = target.shape == param.shape and target.stride() == param.stride()
        has_tensors = any(isinstance(arg, Tensor) for arg in rest)
        if is_whole and operation in FIRST and not has_tensors:
            self.programs[name] = Program([(operation, rest, _options(kwargs))])
        elif is_whole and operation == "copy_" and param.numel() <= MOST_COPIED:
            self.programs[name] = Program(is_computed=True)
        elif is_whole and operation in FURTHER and not has_tensors:
            program.steps.append((operation, rest, _options(kwargs)))
        elif (rows := _rows_of(target, param)) and (
            operation == "zero_" or (operation == "fill_" and rest[:1] == (0,))
        ):
            program.zero_rows += rows
        elif program.is_computed and is_whole:
            pass  # part of the computation, which is repeated as a whole
        else:
            program.unknown = program.unknown or operation


def record_initialization(
    causal_lm: Any,
    names: Mapping[nn.Parameter, str],
    buffers: Sequence[Tensor] = (),
) -> Recorder:
    """Record how transformers initializes a model on the meta device.

    Args:
        causal_lm: of transformers.
        names: of parameters; a shared one has the name of the one that is initialized.
        buffers: of the model.
    """
    with _separate_heads(causal_lm), _initialized_again(causal_lm):
        parameters = {name: param for param, name in names.items()}
        with Recorder(parameters, buffers) as recorder:
            causal_lm.initialize_weights()
    return recorder


class RecordedInitialization:
    """Repeats recorded programs; see ``DecoderModel.row_initializer``.

    Args:
        causal_lm: of transformers, on the meta device.
        names: of its parameters.
        buffers: of the model.
    """

    def __init__(
        self,
        causal_lm: Any,
        names: Mapping[nn.Parameter, str],
        buffers: Sequence[Tensor] = (),
    ) -> None:
        recorder = record_initialization(causal_lm, names, buffers)
        self.programs = recorder.programs
        self.written_buffers = recorder.written_buffers
        owners = {
            name: (module, attribute)
            for module in causal_lm.modules()
            for attribute, param in module.named_parameters(recurse=False)
            if (name := names.get(param)) is not None
        }
        initializers = initializers_of(causal_lm)
        self._copies = {
            name: (
                _copy_on_meta(owners[name][0]),
                owners[name][1],
                initializers[owners[name][0]],
            )
            for name, program in self.programs.items()
            if program.is_computed
        }

    def problems(self) -> dict[str, str]:
        """Name of each parameter without a program → why."""
        return {
            name: program.problem
            for name, program in self.programs.items()
            if program.problem is not None
        }

    def zero_rows(self) -> dict[str, Sequence[int]]:
        """Rows that are zero."""
        return {
            name: program.zero_rows
            for name, program in self.programs.items()
            if program.zero_rows
        }

    def row_initializer(self) -> RowInitializer:
        """Return the function that fills rows."""

        def init_rows(name: str, rows: Tensor, generator: torch.Generator) -> None:
            program = self.programs[name]
            if program.problem is not None:
                raise ValueError(f"{name} has no initial values: {program.problem}")
            if program.is_computed:
                rows.copy_(self._computed(name, generator).reshape(rows.shape))
                return
            for operation, args, options in program.steps:
                if operation in DRAWS:
                    options = options | {"generator": generator}
                getattr(rows, operation)(*args, **options)

        return init_rows

    def _computed(self, name: str, generator: torch.Generator) -> Tensor:
        """A value that the family's code computes, with the random state of a generator."""
        module, attribute, initialize = self._copies[name]
        param = module.get_parameter(attribute)
        values = nn.Parameter(torch.zeros(param.shape), requires_grad=False)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        module._parameters[attribute] = values
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(generator.initial_seed())
                initialize(module)
        finally:
            module._parameters[attribute] = param
        return values.data


def _copy_on_meta(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    copied._is_hf_initialized = False  # type: ignore[assignment]
    return copied


@contextmanager
def _separate_heads(causal_lm: Any) -> Iterator[None]:
    """Untie the head for a while: it would draw over the embedding, which transformers initializes
    before it ties."""
    head = causal_lm.get_output_embeddings()
    tied = head.weight
    is_tied = tied is causal_lm.get_input_embeddings().weight
    if is_tied:
        head.weight = nn.Parameter(torch.empty_like(tied))
    try:
        yield
    finally:
        if is_tied:
            head.weight = tied


@contextmanager
def _initialized_again(causal_lm: nn.Module) -> Iterator[None]:
    """Clear the marks by which transformers skips what is initialized."""
    marked: list[Any] = [
        holder
        for holder in (
            *causal_lm.modules(),
            *causal_lm.parameters(),
            *causal_lm.buffers(),
        )
        if getattr(holder, "_is_hf_initialized", False)
    ]
    for holder in marked:
        holder._is_hf_initialized = False
    try:
        yield
    finally:
        for holder in marked:
            holder._is_hf_initialized = True


def _rows_of(part: Tensor, param: Tensor) -> list[int]:
    """Rows of a matrix that a view of it covers; empty if it is no such view."""
    if param.ndim != 2 or part.numel() == 0 or not part.is_contiguous():
        return []
    columns = param.shape[1]
    start = int(part.storage_offset()) - int(param.storage_offset())
    first, offset = divmod(start, columns)
    count, rest = divmod(part.numel(), columns)
    return [] if offset or rest else list(range(first, first + count))


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}
