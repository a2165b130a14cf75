"""Streams of FSDP1's backward.

Autograd issues an operator's backward on the stream of its forward (``Node::stream`` in
``torch/csrc/autograd/function.h``). FSDP1 makes the views of a unit's flat parameter while the
gathering stream is current, so their backward, which joins the unit's gradients, allocates from
that stream's pool, and so does the hook after it. For autograd a device made in Python has no
streams. Gradients that cross streams are recorded on the new stream, which waits for the old one,
as in autograd's engine (``torch/csrc/autograd/input_buffer.cpp``). Private API of PyTorch: tested
with torch 2.13.
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

from .fake_device import MODULE, Stream

JOINS = ("SplitBackward0", "SplitWithSizesBackward0")
"""Backward nodes of the operators that make the views; they join the gradients."""
_ISSUED = "issued on the stream of its forward"


def fsdp1_streams() -> list[tuple[Any, str, Any]]:
    """Return replacements that issue the backward of FSDP1's views, and the hook after it, on the
    stream of their forward."""
    make_views = FlatParamHandle._use_unsharded_views
    finish = _runtime_utils._post_backward_hook

    def watched_views(handle: FlatParamHandle, as_params: bool) -> None:
        make_views(handle, as_params)
        if not as_params and MODULE.current is not MODULE.default:
            join = _join_of(handle)
            if join is not None:
                _issue_on(join, MODULE.current)

    def finish_on_stream(state: Any, handle: Any, *args: Any) -> Any:
        with MODULE.stream(state._unshard_stream):
            return finish(state, handle, *args)

    hook = (_runtime_utils, "_post_backward_hook", finish_on_stream)
    return [(FlatParamHandle, "_use_unsharded_views", watched_views), hook]


def _join_of(handle: FlatParamHandle) -> Node | None:
    """The node from which all views of a unit come; None without a graph."""
    for name, module, _ in handle.flat_param._param_infos:
        node = getattr(module, name).grad_fn
        while node is not None:
            if node.name() in JOINS:
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _issue_on(node: Node, stream: Stream) -> None:
    """Issue a node's backward on a stream; later calls for the same node do nothing."""
    notes: dict[str, Any] = node.metadata  # type: ignore[assignment]
    if _ISSUED in notes:
        return  # with original parameters the forward's views are made again before the backward
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
