"""FSDP1's gradients are put together on the stream that its parameters are gathered on.

Autograd notes which stream an operator was issued on, and issues its backward there
(``Node::stream`` in ``torch/csrc/autograd/function.h``). FSDP1 makes the views of a unit's flat parameter while the
gathering stream is current, so the backward of those views, which joins all gradients of the unit into one, takes its
memory from that stream's pool, and so does what comes after: the hook that frees the unit's parameters and hands the
gradient to the reduction runs on that stream too. A device made in Python has no streams as far as autograd can see,
so all of that would land on the computing stream; here it is put where it belongs.

Gradients that cross from one stream to another are recorded on the latter, which waits for the former, as the engine
does it (``torch/csrc/autograd/input_buffer.cpp``). FSDP2 makes its parameters on the computing stream and needs none of
this. Private API of PyTorch: tried with torch 2.13.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

from .fake_device import MODULE, Stream

JOINS = ("SplitBackward0", "SplitWithSizesBackward0")
"""Names of the operator that views are made by, whose backward joins gradients."""
_ISSUED = "issued on the stream of its forward"


@contextmanager
def backward_on_forward_streams() -> Iterator[None]:
    """Issue the backward of FSDP1's views, and what follows it, on the stream that they were made on; twice is once."""
    if hasattr(_runtime_utils._post_backward_hook, "original"):
        yield
        return
    make_views, finish = FlatParamHandle._use_unsharded_views, _runtime_utils._post_backward_hook

    def watched_views(handle: FlatParamHandle, as_params: bool) -> None:
        make_views(handle, as_params)
        if not as_params and MODULE.current is not MODULE.default:
            join = _join_of(handle)
            if join is not None:
                _issue_on(join, MODULE.current)

    def finish_on_stream(state: Any, handle: Any, *args: Any) -> Any:
        with MODULE.stream(state._unshard_stream):
            return finish(state, handle, *args)

    finish_on_stream.original = finish  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FlatParamHandle, "_use_unsharded_views", watched_views))
        stack.enter_context(mock.patch.object(_runtime_utils, "_post_backward_hook", finish_on_stream))
        yield


def _join_of(handle: FlatParamHandle) -> Node | None:
    """The node that all views of a unit come from; None where nothing is differentiated."""
    for name, module, _ in handle.flat_param._param_infos:
        node = getattr(module, name).grad_fn
        while node is not None:
            if node.name() in JOINS:
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _issue_on(node: Node, stream: Stream) -> None:
    """Let a node's backward be issued on a stream, the first that it is told."""
    notes: dict[str, Any] = node.metadata  # type: ignore[assignment]
    if _ISSUED in notes:
        return  # with original parameters the views of the forward come again before the backward
    notes[_ISSUED] = True
    before: list[Stream] = []

    def begin(gradients: tuple[Tensor, ...]) -> None:
        before.append(MODULE.current)
        stream.wait_stream(MODULE.current)
        for gradient in gradients:
            if gradient is not None:
                gradient.record_stream(stream)  # type: ignore[arg-type]
        MODULE.set_stream(stream)

    def end(*_: Any) -> None:
        MODULE.set_stream(before.pop())

    node.register_prehook(begin)
    node.register_hook(end)
