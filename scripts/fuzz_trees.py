"""Random module trees and options for ``fuzz_toys``, as plain values that can be drawn, printed, built and shrunk."""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
STEPS = 3
LEAVES = ("linear", "linear", "mlp", "scale", "norm", "batch_norm", "lookup", "dropout")
CONTAINERS = ("chain", "chain", "residual", "branches", "twice", "recompute", "recompute_reentrant")
HOOKS = ("forward", "forward_pre", "backward", "backward_pre", "output")
ACCUMULATE_HOOK = "accumulate"


@dataclass
class Node:
    """One module of a tree."""

    kind: str
    number: int
    """Different in all nodes of a tree."""
    children: list["Node"] = field(default_factory=list)
    unit: bool = False
    """Whether ``fully_shard`` makes a unit of it."""
    grouped: bool = False
    """Whether its first two children are one unit."""
    frozen: bool = False
    dtype: str = "float32"
    hook: str = ""
    bias: bool = True
    spare: bool = False
    """Whether it returns a second tensor, which nobody uses."""
    tied_to: int = -1
    """Number of the node whose weight it uses instead of its own."""
    pattern: list[int] = field(default_factory=list)
    """Of branches: the child that runs, step by step; -1 runs all but the last."""


@dataclass
class Tree:
    """A model, how it is trained, and the options of the toy."""

    ranks: int
    root: Node
    micro_batches: int = 1
    syncs: list[bool] = field(default_factory=lambda: [True])
    """Whether each micro-batch of a step reduces gradients."""
    order: str = "each"
    """A backward after each forward, one for all forwards ("together"), or all forwards first ("crossed")."""
    optimizer: str = "sgd"
    sets_to_none: bool = True
    input_needs_grad: bool = False
    evaluates: bool = False
    """Whether a forward without gradients follows each step."""
    by_rank: bool = False
    """Whether ranks run different branches."""
    output: str = "tensor"
    options: dict[str, Any] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """List all nodes, parents first."""
        return list(walk(self.root))


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def draw_tree(toy: str, draw: random.Random) -> Tree:
    """Draw a tree for a toy, "fsdp" or "ddp"."""
    ranks = draw.choice([2, 2, 2, 2, 2, 2, 3, 4])
    numbers = iter(range(1000))
    ends = [Node("linear", next(numbers)) for _ in range(2)]
    tree = Tree(ranks, Node("chain", next(numbers), [ends[0], _draw_node(draw, numbers, 3), ends[1]]))
    nodes = tree.nodes()
    tree.micro_batches = draw.choice([1, 1, 2, 3])
    tree.syncs = [draw.random() < 0.4 for _ in range(tree.micro_batches - 1)] + [True]
    tree.optimizer = draw.choice(["sgd", "adamw"])
    tree.sets_to_none = draw.random() < 0.75
    tree.input_needs_grad = draw.random() < 0.4
    tree.evaluates = draw.random() < 0.25
    tree.output = draw.choice(["tensor", "tensor", "dict", "tuple"])
    for node in draw.sample(nodes, min(len(nodes), draw.choice([0, 0, 1, 2]))):
        node.hook = draw.choice([*HOOKS, ACCUMULATE_HOOK])
    for node in nodes:
        node.frozen = draw.random() < 0.1 and node not in (tree.root, *ends)
        node.spare = draw.random() < 0.1
    (_finish_fsdp if toy == "fsdp" else _finish_ddp)(tree, draw)
    linears = [node for node in nodes if node.kind == "linear"]
    if len(linears) > 1 and draw.random() < 0.3:
        one, other = draw.sample(linears, 2)
        homes = homes_of(tree.root)
        if (homes[one.number], one.dtype) == (homes[other.number], other.dtype) or draw.random() < 0.1:
            other.tied_to, other.frozen = one.number, one.frozen
    return tree


def _draw_node(draw: random.Random, numbers: Iterator[int], depth: int) -> Node:
    if depth == 0 or draw.random() < 0.25:
        return _leaf(draw, numbers)
    kind = draw.choice(CONTAINERS)
    count = draw.randint(2, 4) if kind in ("chain", "branches") else 1
    node = Node(kind, next(numbers), [_draw_node(draw, numbers, depth - 1) for _ in range(count)])
    if kind == "branches":
        steady = draw.randint(-1, count - 1)
        node.pattern = [steady if draw.random() < 0.5 else draw.randint(-1, count - 1) for _ in range(STEPS)]
        if draw.random() < 0.3:
            node.pattern = [steady] * STEPS
    return node


def _leaf(draw: random.Random, numbers: Iterator[int]) -> Node:
    return Node(draw.choice(LEAVES), next(numbers), bias=draw.random() < 0.7)


def _finish_fsdp(tree: Tree, draw: random.Random) -> None:
    tree.order = draw.choice(["each", "each", "each", "together", "crossed"])
    tree.root.unit = True
    for node in tree.nodes():
        node.unit = node.unit or draw.random() < (0.2 if node.kind in LEAVES else 0.5)
    for node in tree.nodes():
        free = len(node.children) > 1 and not any(child.unit for child in node.children[:2])
        node.grouped = node.kind == "chain" and free and draw.random() < 0.3
    homes = homes_of(tree.root)
    dtypes = {home: draw.choice(["float32"] * 5 + ["bfloat16", "float64"]) for home in sorted(set(homes.values()))}
    for node in tree.nodes():
        node.dtype = draw.choice(["float64", "bfloat16"]) if draw.random() < 0.01 else dtypes[homes[node.number]]
    dtype = [None] * 4 + ["bfloat16", "float16"]
    policies = [None, None, {"param_dtype": draw.choice(dtype), "reduce_dtype": draw.choice([*dtype, "float32"])}]
    policy = draw.choice(policies)
    if policy is not None and draw.random() < 0.5:
        policy |= {"output_dtype": draw.choice([None, "float32"]), "cast_forward_inputs": draw.random() < 0.5}
    tree.options = {
        "policy": policy,
        "reshard": draw.choice([None, None, True, False, 2 if tree.ranks == 4 else None]),
        "replicas": tree.ranks == 4 and draw.random() < 0.4,
        "second_dim": draw.random() < 0.15,
        "keeps_after_backward": draw.random() < 0.15,
        "unused_reduced": draw.random() < 0.15,
        "ahead": draw.choice([1, 1, 1, 2, 3]),
        "divide_by": draw.choice([None] * 5 + [1.0, 3.0]),
        "last_backward": draw.random() < 0.15,
        "prefetch": draw.choice([None] * 4 + ["forward", "backward"]),
    }
    if tree.options["reshard"] == 2:
        tree.options["replicas"] = False
    if not tree.options["unused_reduced"]:
        return
    # Ranks may use different parameters of a unit; a unit runs on all of them or none.
    tree.by_rank = not any(node.grouped or (node.unit and node is not tree.root) for node in tree.nodes())


def _finish_ddp(tree: Tree, draw: random.Random) -> None:
    tree.order = draw.choice(["each", "each", "each", "together"])
    reentrant = any(node.kind == "recompute_reentrant" for node in tree.nodes())
    branches = [node for node in tree.nodes() if node.kind == "branches"]
    static = draw.random() < (0.85 if reentrant else 0.2)
    if static:
        tree.syncs = [sync or draw.random() < 0.9 for sync in tree.syncs]
        for node in branches:
            node.pattern = node.pattern[:1] * STEPS
    # Of recomputed branches that only some ranks run, PyTorch's class hangs: the search does not reach them.
    tree.by_rank = not static and not reentrant and draw.random() < 0.4
    unused = bool(branches)
    for node in tree.nodes():
        node.dtype = draw.choice(["float32"] * 6 + ["bfloat16", "float64"])
        # Of sparse gradients that a rank does not have, PyTorch's class raises on that rank, and the others wait.
        if node.kind == "lookup" and tree.optimizer == "sgd" and not branches and draw.random() < 0.5:
            node.kind = "sparse_lookup"
    tree.options = {
        "bucket_cap_mb": draw.choice([None, 25, 0.0005, 0.00005]),
        "gradient_as_bucket_view": draw.random() < 0.5,
        "find_unused_parameters": draw.random() < (0.95 if unused and not static else 0.2) or (unused and tree.by_rank),
        "static_graph": static,
        "set_later": static and draw.random() < 0.3,
        "sync_buffers": draw.random() < 0.7,
        "hook": draw.choice([None] * 4 + ["allreduce", "fp16", "sum", "parts", "done"]),
        "ignored": draw.choice([False] * 5 + [True]),
    }


def homes_of(root: Node) -> dict[int, int]:
    """Map each node's number to the unit that has its parameters; a group has the number of its parent, negative."""
    homes: dict[int, int] = {}

    def visit(node: Node, home: int) -> None:
        home = node.number if node.unit else home
        homes[node.number] = home
        for place, child in enumerate(node.children):
            visit(child, -1 - node.number if node.grouped and place < 2 else home)

    visit(root, root.number)
    return homes


class Part(nn.Module):
    """The module of a node."""

    def __init__(self, node: Node, clock: dict[str, int]) -> None:
        super().__init__()
        self.node, self.clock = node, clock
        self.parts = nn.ModuleList(Part(child, clock) for child in node.children)
        dtype = getattr(torch, node.dtype)
        self.layer: nn.Module | None = None
        if node.kind == "linear":
            self.layer = nn.Linear(WIDTH, WIDTH, bias=node.bias)
        elif node.kind == "mlp":
            self.layer = nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH + 1), nn.ReLU(), nn.Linear(2 * WIDTH + 1, WIDTH, bias=node.bias)
            )
        elif node.kind == "norm":
            self.layer = nn.LayerNorm(WIDTH)
        elif node.kind == "batch_norm":
            self.layer = nn.BatchNorm1d(WIDTH)
        elif node.kind in ("lookup", "sparse_lookup"):
            self.layer = nn.Embedding(5, WIDTH, sparse=node.kind == "sparse_lookup")
        elif node.kind == "dropout":
            self.layer = nn.Dropout(0.3)
        elif node.kind == "scale":
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=dtype))
        if self.layer is not None:
            self.layer.to(dtype)
        if node.frozen:
            self.requires_grad_(False)

    def forward(self, hidden_BTD: Tensor) -> Any:
        """Run the node."""
        output_BTD = self._run(hidden_BTD)
        return (output_BTD, {"spare": output_BTD * 2}) if self.node.spare else output_BTD

    def _run(self, hidden_BTD: Tensor) -> Tensor:
        kind = self.node.kind
        if kind == "branches":
            turn = self.node.pattern[self.clock["step"] % len(self.node.pattern)]
            turn = turn if turn < 0 else (turn + self.clock["rank"]) % len(self.parts)
            running = (list(self.parts)[:-1] or self.parts) if turn < 0 else [self.parts[turn]]
            return sum((first(part(hidden_BTD)).to(hidden_BTD.dtype) for part in running), torch.zeros(()))  # type: ignore[return-value]
        if self.parts:
            times = 2 if kind == "twice" else 1
            before_BTD = hidden_BTD
            for part in [*self.parts] * times:
                if kind.startswith("recompute"):
                    hidden_BTD = first(checkpoint(part, hidden_BTD, use_reentrant=kind.endswith("reentrant")))
                else:
                    hidden_BTD = first(part(hidden_BTD))
            return hidden_BTD + before_BTD if kind == "residual" else hidden_BTD
        if kind == "scale":
            return hidden_BTD.to(self.scale.dtype) * self.scale
        assert self.layer is not None
        param = next(self.layer.parameters(), None)
        if param is not None:
            hidden_BTD = hidden_BTD.to(param.dtype)
        if kind.endswith("lookup"):
            rows_BT = (hidden_BTD.detach()[..., 0].float() * 7).long() % 5
            return hidden_BTD + self.layer(rows_BT)
        if kind == "batch_norm":
            return self.layer(hidden_BTD.flatten(0, 1)).view_as(hidden_BTD)  # type: ignore[no-any-return]
        return self.layer(hidden_BTD)  # type: ignore[no-any-return]


class Model(nn.Module):
    """A tree's module inside one that returns nested outputs."""

    def __init__(self, tree: Tree, rank: int) -> None:
        super().__init__()
        self.clock = {"step": 0, "rank": rank if tree.by_rank else 0}
        self.output, self.body = tree.output, Part(tree.root, self.clock)
        parts = self.by_number()
        for node in tree.nodes():
            if node.tied_to in parts and node.kind == "linear":
                parts[node.number].layer.weight = parts[node.tied_to].layer.weight  # type: ignore[union-attr]
        for node in tree.nodes():
            _add_hook(parts[node.number], node.hook)

    def by_number(self) -> dict[int, Part]:
        """Map the numbers of nodes to their modules."""
        return {module.node.number: module for module in self.modules() if isinstance(module, Part)}

    def forward(self, hidden_BTD: Tensor) -> Any:
        """Run the tree."""
        output_BTD = first(self.body(hidden_BTD))
        if self.output == "tensor":
            return output_BTD
        spare = output_BTD * 3
        return {"used": output_BTD, "spare": [spare, "text"]} if self.output == "dict" else (output_BTD, spare)


def first(output: Any) -> Tensor:
    """Return the tensor of an output that others use."""
    if isinstance(output, dict):
        output = output["used"]
    return output[0] if isinstance(output, tuple) else output


def _add_hook(part: Part, hook: str) -> None:
    """Add a hook that changes values or gradients."""
    if hook == "forward":
        part.register_forward_hook(lambda module, args, output: _scaled(output))
    elif hook == "forward_pre":
        part.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
    elif hook == "backward":
        part.register_full_backward_hook(
            lambda module, into, out: tuple(None if grad is None else grad * 0.75 for grad in into)
        )
    elif hook == "backward_pre":
        part.register_full_backward_pre_hook(
            lambda module, out: tuple(None if grad is None else grad * 0.75 for grad in out)
        )
    elif hook == "output":
        part.register_forward_hook(_watch_output)


def _scaled(output: Any) -> Any:
    return (output[0] * 1.25, *output[1:]) if isinstance(output, tuple) else output * 1.25


def _watch_output(module: nn.Module, args: Any, output: Any) -> None:
    if first(output).requires_grad:
        first(output).register_hook(lambda grad: grad * 0.5)


def smaller(tree: Tree) -> Iterator[Tree]:
    """Yield trees that are one change simpler, large changes first."""
    for number in [node.number for node in tree.nodes()]:
        for place in range(4):
            made = dataclasses.replace(tree, root=_copy(tree.root))
            parent = next(node for node in made.nodes() if node.number == number)
            if place < len(parent.children) and len(parent.children) > 1:
                del parent.children[place]
                parent.grouped = parent.grouped and len(parent.children) > 1
                parent.pattern = [min(turn, len(parent.children) - 1) for turn in parent.pattern]
                yield made
            if place < len(parent.children) and parent.number == made.root.number:
                yield dataclasses.replace(made, root=dataclasses.replace(parent.children[place], unit=made.root.unit))
    plain = Tree(2, tree.root)
    for name in ("ranks", "output", "evaluates", "input_needs_grad", "sets_to_none", "optimizer", "order", "by_rank"):
        if getattr(tree, name) != getattr(plain, name):
            yield dataclasses.replace(tree, **{name: getattr(plain, name)})
    if tree.micro_batches > 1:
        yield dataclasses.replace(tree, micro_batches=tree.micro_batches - 1, syncs=tree.syncs[1:])
    for name, value in tree.options.items():
        if value and name != "find_unused_parameters":
            yield dataclasses.replace(tree, options=tree.options | {name: None if value is not True else False})
    for number in [node.number for node in tree.nodes()]:
        for name in ("hook", "spare", "frozen", "tied_to", "unit", "grouped", "dtype", "bias"):
            made = dataclasses.replace(tree, root=_copy(tree.root))
            node = next(node for node in made.nodes() if node.number == number)
            simple = getattr(Node("", 0), name)
            if getattr(node, name) != simple and not (name == "unit" and node is made.root):
                setattr(node, name, simple)
                yield made


def _copy(node: Node) -> Node:
    return dataclasses.replace(node, children=[_copy(child) for child in node.children], pattern=list(node.pattern))
