"""Finds and evaluates what lies between a projection and an attention operand.

Walking up from an operand through operators that only move or rotate numbers, every point where
all paths meet in one tensor is a *stem*: the operand is a function of that tensor alone, besides
tables computed from positions (cos and sin). What the function does is learned by running it;
where positions look up a table in the weights file, any numbers will do in its place.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, Cut, Probe
from kvconv.converter.rewrite.graph import (
    Editor,
    attributes_key,
    constant_key,
    is_external,
    is_past,
    producer,
    sort,
)

Layout = Literal["BSD", "BSNH", "BNSH"]
"""Axes of a stem: B batch, S sequence, N heads, H head_dim, D = N*H."""

_ARITHMETIC = {"Add", "Sub", "Mul", "Neg"}
_MOVES = {
    "Cast", "Concat", "Expand", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
}  # fmt: skip
_GATHERS = {"Gather", "GatherElements", "GatherND"}
_PROBE_BATCH, _PROBE_PAST, _PROBE_NEW = 2, 3, 5


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes between a stem and an operand.

    Attributes:
        operand: What the region computes.
        stem: The one tensor all of it comes from.
        nodes: From the operand up.
        tables: Float tensors that depend on positions only, in the order met.
        stored: Constants in the weights file that the tables may be looked up in.
    """

    operand: gs.Variable
    stem: gs.Variable
    nodes: tuple[gs.Node, ...]
    tables: tuple[gs.Variable, ...]
    stored: tuple[gs.Constant, ...] = ()

    def layouts(self, heads: int, head_dim: int) -> list[Layout]:
        """Return the layouts that the stem's shape allows; none if its shape is not known."""
        shape = self.stem.shape
        if shape is None:  # probing cannot tell: a Reshape accepts every layout
            return []
        if len(shape) == 3:
            return ["BSD"] if shape[2] == heads * head_dim else []
        if len(shape) != 4 or shape[3] != head_dim:
            return []
        return ["BNSH"] if shape[1] == heads else ["BSNH"] if shape[2] == heads else []

    def key(self) -> object:
        """Return a key that is equal for regions which compute the same function."""
        local = {self.stem.name: 0}
        for node in reversed(self.nodes):
            for tensor in node.outputs:
                local[tensor.name] = len(local)
        return tuple(
            (
                node.op,
                attributes_key(node),
                tuple(local.get(tensor.name, constant_key(tensor)) for tensor in node.inputs),
                tuple(local[tensor.name] for tensor in node.outputs),
            )
            for node in self.nodes
        )

    def run(self, graph: gs.Graph, heads: Array, layout: Layout) -> tuple[Array, list[Array]]:
        """Compute the operand and the tables from a stem's values.

        Args:
            graph: Where the region lives.
            heads: `probe_heads`, [batch_size, sequence_length, heads, head_dim].
            layout: How to lay them out for the stem.

        Raises:
            NotEvaluableError: The region cannot be run, or not with this layout.
        """
        cut = Cut(graph, [self.operand, *self.tables], [self.stem, *self.stored])
        feeds = _PROBE.feeds() | {self.stem.name: to_layout(heads, layout).astype(self.stem.dtype)}
        random = np.random.default_rng(0)
        for table in self.stored:
            feeds[table.name] = random.standard_normal(table.shape).astype(table.dtype)
        operand, *tables = cut.run(feeds)
        return operand, tables


class Walker:
    """Walks regions up from operands; puts the graph in topological order first."""

    def __init__(self, graph: gs.Graph) -> None:
        sort(graph)
        self._order = {id(node): index for index, node in enumerate(graph.nodes)}
        self._data = {names.INPUT_IDS} | {tensor.name for tensor in graph.inputs if is_past(tensor)}
        self._stored: dict[str, gs.Constant] = {}
        constants: dict[str, gs.Constant] = {}  # in the weights file, as they are or moved
        for node in graph.nodes:
            source = node.inputs[0] if node.inputs else gs.Variable.empty()
            table = source if is_external(source) else constants.get(source.name)
            if table is not None and node.op in _GATHERS and not self._is_data(node.inputs[1]):
                self._stored[table.name] = table
                continue
            if table is not None and node.op in _MOVES:
                constants[node.outputs[0].name] = table
            if node.op != "Shape" and (node.domain or any(map(self._is_data, node.inputs))):
                self._data |= {tensor.name for tensor in node.outputs}

    def regions(self, operand: gs.Variable) -> list[Region]:
        """Return the regions above an operand whose stems have its type, the shortest first."""
        found = []
        nodes: list[gs.Node] = []
        tables: dict[str, gs.Variable] = {}
        frontier = [self._entry(operand)]
        while frontier:
            node = producer(frontier[0][2])
            if node is None or not _only_moves(node):
                break
            while frontier and frontier[0][2].inputs[:1] == [node]:  # all outputs of one Split
                heapq.heappop(frontier)
            nodes.append(node)
            for tensor in node.inputs:
                if self._is_data(tensor):
                    if all(tensor.name != name for _, name, _ in frontier):
                        heapq.heappush(frontier, self._entry(tensor))
                elif isinstance(tensor, gs.Variable) and _is_float(tensor):
                    tables[tensor.name] = tensor
            stem = frontier[0][2] if len(frontier) == 1 else None
            # A half-precision model may norm in float32: behind the Cast the type is another.
            if stem is not None and stem.dtype == operand.dtype:
                stored = tuple(self._stored.values())
                found.append(Region(operand, stem, tuple(nodes), tuple(tables.values()), stored))
        return found

    def _entry(self, tensor: gs.Variable) -> tuple[int, str, gs.Variable]:
        """Return a heap entry; the node that comes last in the graph is walked first."""
        node = producer(tensor)
        return (0 if node is None else -self._order[id(node)], tensor.name, tensor)

    def _is_data(self, tensor: gs.Tensor) -> bool:
        """Tell whether a tensor depends on tokens, weights or the cache's content."""
        return tensor.name in self._data or is_external(tensor)


def probe_heads(heads: int, head_dim: int) -> Array:
    """Return random heads [batch_size, sequence_length, heads, head_dim] float32 for a probe."""
    shape = (*_PROBE.position_ids.shape, heads, head_dim)
    return np.random.default_rng(heads).standard_normal(shape).astype(np.float32)


def to_layout(heads: Array, layout: Layout) -> Array:
    """Lay heads [B,S,N,H] out as a stem."""
    if layout == "BSD":
        return heads.reshape(*heads.shape[:2], -1)
    return heads.transpose(0, 2, 1, 3) if layout == "BNSH" else heads


def flatten_heads(editor: Editor, tensor: gs.Variable, layout: Layout, width: int) -> gs.Variable:
    """Add what turns a stem into an operand of FlashAttention, [B,S,width]."""
    dtype = tensor.dtype
    if layout == "BNSH":
        shape = None if tensor.shape is None else [tensor.shape[axis] for axis in (0, 2, 1, 3)]
        perm = {"perm": [0, 2, 1, 3]}
        tensor = editor.add("Transpose", [tensor], perm, dtype=dtype, shape=shape)
    if layout == "BSD":
        return tensor
    return editor.add(
        "Reshape", [tensor, editor.ints(0, 0, width)],
        dtype=dtype, shape=[names.DIM_BATCH, names.DIM_SEQUENCE, width],
    )  # fmt: skip


def is_close(actual: Array, expected: Array) -> bool:
    """Compare what a region gave with what it should give; a wrong guess is off by about 1."""
    tolerance = 1e-2 if actual.dtype == np.float16 else 1e-4
    return actual.shape == expected.shape and bool(
        np.allclose(actual, expected, rtol=tolerance, atol=tolerance)
    )


def _only_moves(node: gs.Node) -> bool:
    if node.op in _MOVES:
        return not node.domain
    # Arithmetic with a constant is a bias, a norm's weight or a scale: part of what is projected.
    return node.op in _ARITHMETIC and not any(isinstance(t, gs.Constant) for t in node.inputs)


def _is_float(tensor: gs.Variable) -> bool:
    return tensor.dtype is not None and np.issubdtype(np.dtype(tensor.dtype), np.floating)


def _make_probe() -> Probe:
    positions = np.random.default_rng(1).permutation(50)[: _PROBE_BATCH * _PROBE_NEW]
    return Probe(
        np.ones((_PROBE_BATCH, _PROBE_PAST + _PROBE_NEW), np.int64),
        positions.reshape(_PROBE_BATCH, _PROBE_NEW).astype(np.int64),
    )


_PROBE = _make_probe()
