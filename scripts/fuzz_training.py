"""Training of a random tree with a toy or with PyTorch's class, and the comparison of both, for ``fuzz_toys``."""

import contextlib
import functools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as native_fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from fsdptoys.toys import fsdp as toy_fsdp
from fsdptoys.toys.ddp import DistributedDataParallel as ToyDDP
from scripts.fuzz_trees import ACCUMULATE_HOOK, STEPS, WIDTH, Model, Tree, first

Record = dict[str, Tensor | str | None]
"""Name of a value → the value, in the order of training."""


@functools.cache
def mesh_of(replicas: bool) -> DeviceMesh:
    """Return the mesh of one axis, or of replicas; the same one for all trees of a process group."""
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (2, ranks // 2) if replicas else (ranks,), mesh_dim_names=("r", "s")[not replicas :])


def train(toy: str, tree: Tree, is_toy: bool) -> Record:
    """Train a tree with the toy or with PyTorch's class; an exception becomes the last record.

    Args:
        toy: "fsdp" or "ddp".
        tree: the tree.
        is_toy: or PyTorch's.
    """
    record: Record = {}
    torch.manual_seed(dist.get_rank() if toy == "ddp" else 0)  # DDP sends rank 0's parameters
    try:
        if toy == "fsdp":
            model = _shard(tree, toy_fsdp if is_toy else native_fsdp, mesh_of(bool(tree.options["replicas"])))
        else:
            model = _replicate(tree, ToyDDP if is_toy else NativeDDP)
        torch.manual_seed(100 + dist.get_rank())  # of inputs and dropout
        _train(tree, model, record)
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        record["traceback"] = traceback.format_exc()
    return record


def _shard(tree: Tree, library: Any, mesh: DeviceMesh) -> nn.Module:
    model, options = Model(tree, dist.get_rank()), tree.options
    dtypes = {name: getattr(torch, str(value), value) for name, value in (options["policy"] or {}).items()}
    reshard, ranks = options["reshard"], mesh.size(mesh.ndim - 1)

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % ranks == 0 else None

    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(**dtypes)}
    settings["reshard_after_forward"] = reshard
    if options["second_dim"]:
        settings["shard_placement_fn"] = place
    parts = model.by_number()
    units: list[Any] = []
    for node in reversed(tree.nodes()):
        if node.grouped:
            library.fully_shard([parts[child.number] for child in node.children[:2]], **settings)
            units.append(parts[node.children[0].number])
        if node.unit and node is not tree.root:
            units.append(library.fully_shard(parts[node.number], **settings))
    root: Any = library.fully_shard(model, **settings)
    if options["keeps_after_backward"]:
        root.set_reshard_after_backward(False)
    if options["unused_reduced"]:
        root.set_reduce_scatter_unused_params(True)
    if options["ahead"] and options["ahead"] > 1:
        root.set_reduce_scatter_max_input_buffers(options["ahead"])
    for each in [*units, root] if options["divide_by"] else []:
        each.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        each.set_gradient_divide_factor(options["divide_by"])
    for one, other in zip(units[1:], units, strict=False):
        if options["prefetch"] == "forward":
            one.set_modules_to_forward_prefetch([other])
        if options["prefetch"] == "backward":
            other.set_modules_to_backward_prefetch([one])
    return model


def _replicate(tree: Tree, kind: Any) -> nn.Module:
    model, options = Model(tree, dist.get_rank()), tree.options
    if options["ignored"]:
        name = next(name for name, param in model.named_parameters() if param.requires_grad)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.get_parameter(name).data.normal_()
        kind._set_params_and_buffers_to_ignore_for_model(model, [name])
    settings = {name: options[name] for name in ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view")}
    settings["static_graph"] = options["static_graph"] and not options["set_later"]
    wrapped: Any = kind(model, **settings, broadcast_buffers=None if options["sync_buffers"] else False)
    if options["hook"]:
        wrapped.register_comm_hook(None, HOOKS[options["hook"]])
    if options["set_later"]:
        wrapped._set_static_graph()
    return wrapped  # type: ignore[no-any-return]


def _sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 0.25)  # type: ignore[no-any-return]


def _parts(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    for number, grad in enumerate(bucket.gradients()):
        grad.mul_(number + 1)
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def _done(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 3)
    return future


HOOKS = {"allreduce": allreduce_hook, "fp16": fp16_compress_hook, "sum": _sum, "parts": _parts, "done": _done}


def _train(tree: Tree, model: Any, record: Record) -> None:
    inner: Model = model.module if hasattr(model, "module") else model
    for node in tree.nodes():
        if node.hook == ACCUMULATE_HOOK:
            for param in inner.by_number()[node.number].parameters(recurse=False):
                param.register_post_accumulate_grad_hook(_halve)
    params = [param for param in model.parameters() if param.requires_grad]
    makes = {"sgd": functools.partial(torch.optim.SGD, lr=0.05), "adamw": functools.partial(torch.optim.AdamW, lr=0.01)}
    optimizer = makes[tree.optimizer](params)
    for step in range(STEPS):
        inner.clock["step"] = step
        losses: list[Tensor] = []
        for index, reduces in enumerate(tree.syncs):
            input_BTD = torch.randn(2, 3, WIDTH, requires_grad=tree.input_needs_grad)
            last = index == tree.micro_batches - 1
            with _accumulating(tree, model, reduces, last):
                loss = first(model(input_BTD)).float().square().mean()
                losses.append(loss)
                if tree.order == "each":
                    loss.backward()
            record[f"step {step} loss {index}"] = loss.detach().clone()
            if tree.input_needs_grad and tree.order == "each":
                record[f"step {step} gradient of input {index}"] = _own(input_BTD.grad)
        if tree.order == "together":
            torch.stack(losses).sum().backward()
        elif tree.order == "crossed":
            for loss in losses:
                loss.backward()
        for name, param in model.named_parameters():
            record[f"step {step} gradient of {name.removeprefix('module.')}"] = _own(param.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=tree.sets_to_none)
        if tree.evaluates:
            with torch.no_grad():
                record[f"step {step} evaluation"] = first(model(torch.ones(2, 3, WIDTH))).clone()
        for name, value in model.state_dict().items():
            record[f"step {step} {name.removeprefix('module.')}"] = _own(value)


@contextlib.contextmanager
def _accumulating(tree: Tree, model: Any, reduces: bool, last: bool) -> Iterator[None]:
    if hasattr(model, "no_sync"):
        with contextlib.nullcontext() if reduces or tree.order != "each" else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(reduces or tree.order != "each")
    if tree.options["last_backward"]:
        model.set_is_last_backward(last or tree.order != "each")
    yield


@torch.no_grad()
def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _own(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    value = getattr(value, "_local_tensor", value).detach()
    return value.to_dense() if value.is_sparse else value.clone()


def difference(ours: Record, theirs: Record) -> str | None:
    """Describe the first difference between the records of the toy and of PyTorch, if there is any."""
    for name in dict.fromkeys([*theirs, *ours]):
        one, other = ours.get(name, "missing"), theirs.get(name, "missing")
        if name == "error" and "missing" not in (one, other):
            return None
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.dtype == other.dtype and one.shape == other.shape and _bits(one).equal(_bits(other)):
                continue
            return f"{name}: {_describe(one, other)}"
        if isinstance(one, Tensor) or isinstance(other, Tensor) or one is not other:
            if name == "error" or "missing" in (one, other):
                return f"the toy: {sentence(ours.get('error'))}; PyTorch: {sentence(theirs.get('error'))}"
            return f"{name}: {_kind(one)} in the toy, {_kind(other)} in PyTorch"
    return None


def sentence(error: Any) -> str:
    """Return the first line of an error."""
    return str(error or "no error").split("\n")[0][:200]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)


def _describe(ours: Tensor, theirs: Tensor) -> str:
    if _kind(ours) != _kind(theirs):
        return f"{_kind(ours)} in the toy, {_kind(theirs)} in PyTorch"
    apart = (ours.double() - theirs.double()).abs().max().item()
    return f"differs by up to {apart:.3g} of {theirs.abs().max().item():.3g}"
