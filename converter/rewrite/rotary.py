"""Rule `rotary`: rotary embedding of queries and keys moves into FlashAttention.

What stands between a projection and the op is evaluated on random heads and must equal

    half style         x1, x2 = x[..., :R/2], x[..., R/2:R]
    interleaved        x1, x2 = x[..., 0:R:2], x[..., 1:R:2]
    both               out1 = x1 * cos - x2 * sin,   out2 = x2 * cos + x1 * sin,   rest unchanged

with the same cos, sin, style and R for queries and keys. Models hold cos and sin with every value
twice (R wide); the op takes them once, [batch_size or 1, sequence_length, R/2] float32, computed
once per run; they may be looked up in a table of the weights file. No match: the rotation stays in
the graph, and the op gets no cos and sin.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, NotEvaluableError
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    find,
    get_operand,
    operand_heads,
    set_operand,
)
from kvconv.converter.rewrite.region import (
    Layout,
    Region,
    Walker,
    flatten_heads,
    is_close,
    probe_heads,
    to_layout,
)

NAME = "rotary"


@dataclass(frozen=True, slots=True)
class _Rotation:
    """How one operand is rotated.

    Attributes:
        cos: Index into the region's tables; `sin` is the other.
        interleaved: Which elements pair up.
        doubled: Whether the tables hold every value twice.
        rotary_dim: R.
        rank: Dimensions of the tables: 4 with an axis for heads, 3, or 2 without a batch.
        squeeze: The axis for heads; None for none.
        layout: Layout of the stem.
    """

    cos: int
    interleaved: bool
    doubled: bool
    rotary_dim: int
    rank: int
    squeeze: int | None
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Match:
    """A rotated operand."""

    stem: gs.Variable
    cos: gs.Variable
    sin: gs.Variable
    rotation: _Rotation

    def same_angles(self, other: "_Match") -> bool:
        """Tell whether two operands are rotated alike."""
        mine, theirs = self.rotation, other.rotation
        return (self.cos is other.cos and self.sin is other.sin) and (
            (mine.interleaved, mine.rotary_dim) == (theirs.interleaved, theirs.rotary_dim)
        )


def apply(editor: Editor) -> Outcome:
    """Fuse the rotation of every FlashAttention node that has cos and sin upstream."""
    graph = editor.graph
    walker = Walker(graph)
    known: dict[object, _Rotation | None] = {}
    tables: dict[object, gs.Variable] = {}
    refusals = []
    count = 0
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        if get_operand(node, "cos") is not None or get_operand(node, "key") is None:
            continue  # rotated or packed already
        sizes = operand_heads(node)
        query, key = (
            _pattern(graph, walker.regions(get_operand(node, name)), *sizes[name], known)
            for name in ("query", "key")
        )
        if query is None and key is None:
            continue  # no rotary embedding
        if isinstance(query, _Match) and isinstance(key, _Match) and query.same_angles(key):
            _rewrite(editor, node, query, key, tables)
            count += 1
        else:
            refusals.append(Refusal(NAME, node.name, _why_not(query, key)))
    return Outcome(count, tuple(refusals))


def _pattern(
    graph: gs.Graph,
    regions: list[Region],
    heads: int,
    head_dim: int,
    known: dict[object, _Rotation | None],
) -> _Match | str | None:
    """Return how an operand is rotated, why that is not understood, or None if it is not."""
    # A single table scales by position (llama4's attention temperature): no rotation.
    rotated = [region for region in regions if len(region.tables) > 1]
    for region in rotated:
        if len(region.tables) != 2:
            continue
        key = (region.key(), heads, head_dim)
        if key not in known:
            known[key] = _check(graph, region, heads, head_dim)
        rotation = known[key]
        if rotation is not None:
            cos, sin = region.tables[rotation.cos], region.tables[1 - rotation.cos]
            return _Match(region.stem, cos, sin, rotation)
    if not rotated:
        return None
    return f"{rotated[0].operand.name} is not rotated by cos and sin in a known style"


def _check(graph: gs.Graph, region: Region, heads: int, head_dim: int) -> _Rotation | None:
    """Evaluate a region and compare it with every style of rotation."""
    values = probe_heads(heads, head_dim)
    for layout in region.layouts(heads, head_dim):
        try:
            operand, raw = region.run(graph, values, layout)
        except NotEvaluableError:
            continue
        squeeze = _singleton(raw[0])
        if raw[0].shape != raw[1].shape or raw[0].ndim - (squeeze is not None) not in (2, 3):
            continue
        pair = [table if squeeze is None else table.squeeze(squeeze) for table in raw]
        for cos, interleaved, doubled in itertools.product((0, 1), (False, True), (True, False)):
            cosine = _once(pair[cos], interleaved, doubled)
            sine = _once(pair[1 - cos], interleaved, doubled)
            if cosine is None or sine is None or 2 * cosine.shape[-1] > head_dim:
                continue
            expected = _rotate(values, cosine, sine, interleaved)
            if is_close(operand, to_layout(expected, "BSD").astype(operand.dtype)):
                rotary_dim = 2 * cosine.shape[-1]
                return _Rotation(
                    cos, interleaved, doubled, rotary_dim, raw[0].ndim, squeeze, layout
                )
    return None


def _singleton(table: Array) -> int | None:
    """Return the heads axis of a table: [B,1,S,W] or [B,S,1,W]."""
    if table.ndim != 4:
        return None
    return 1 if table.shape[1] == 1 else 2 if table.shape[2] == 1 else None


def _once(table: Array, interleaved: bool, doubled: bool) -> Array | None:
    """Return a table with every value once, or None if its pairs differ."""
    if not doubled:
        return table
    width = table.shape[-1] // 2
    first, second = (
        (table[..., 0::2], table[..., 1::2])
        if interleaved
        else (table[..., :width], table[..., width:])
    )
    return first if first.shape == second.shape and (first == second).all() else None


def _rotate(heads: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate [B,S,N,H] by tables [B or 1,S,R/2] or [S,R/2]."""
    cos, sin = cos[..., None, :].astype(np.float32), sin[..., None, :].astype(np.float32)
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    result = heads.copy()
    result[..., first] = heads[..., first] * cos - heads[..., second] * sin
    result[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return result


def _rewrite(
    editor: Editor, node: gs.Node, query: _Match, key: _Match, tables: dict[object, gs.Variable]
) -> None:
    rotation, sizes = query.rotation, operand_heads(node)
    for name, match in (("query", query), ("key", key)):
        heads, head_dim = sizes[name]
        layout = match.rotation.layout
        set_operand(node, name, flatten_heads(editor, match.stem, layout, heads * head_dim))
    for name, table in (("cos", query.cos), ("sin", query.sin)):
        if table.name not in tables:
            tables[table.name] = _as_input(editor, table, rotation)
        set_operand(node, name, tables[table.name])
    whole_head = rotation.rotary_dim == sizes["query"][1]
    node.attrs["rotary_interleaved"] = int(rotation.interleaved)
    node.attrs["rotary_dim"] = 0 if whole_head else rotation.rotary_dim


def _as_input(editor: Editor, table: gs.Variable, rotation: _Rotation) -> gs.Variable:
    """Turn a table of the model into one of the op: [B or 1,S,R/2] float32."""
    dtype, half = table.dtype, rotation.rotary_dim // 2
    if rotation.squeeze is not None:
        table = editor.add("Squeeze", [table, editor.ints(rotation.squeeze)], dtype=dtype)
    if rotation.rank == 2:
        table = editor.add("Unsqueeze", [table, editor.ints(0)], dtype=dtype)
    if rotation.doubled:
        end, step = (2 * half, 2) if rotation.interleaved else (half, 1)
        bounds = [editor.ints(value) for value in (0, end, -1, step)]
        table = editor.add("Slice", [table, *bounds], dtype=dtype)
    if dtype != np.float32:
        table = editor.add("Cast", [table], {"to": np.float32}, dtype=np.float32)
    return table


def _why_not(query: _Match | str | None, key: _Match | str | None) -> str:
    for operand in (query, key):
        if isinstance(operand, str):
            return operand
    if query is None or key is None:
        return "only one of query and key is rotated"
    return "query and key are rotated by different tables or in different styles"
