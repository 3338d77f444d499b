"""Hand-built graphs as tracing gives them, and ways to run them before and after rewriting.

The smallest decoder with everything the rules look for: embedding, projections, rotary embedding
(half, interleaved, partial or none), a mask made of small operators, the attention placeholder,
an output projection and an LM head. Its weights are random, from a fixed seed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import reference
from kvconv import custom_ops, names
from kvconv.converter.rewrite import write_graph
from kvconv.converter.rewrite.graph import find

BATCH, SEQUENCE, PAST, TOTAL = (
    names.DIM_BATCH,
    names.DIM_SEQUENCE,
    names.DIM_PAST,
    names.DIM_TOTAL,
)
VOCAB = 32


class Builder:
    """Appends nodes to a graph that has a decoder's inputs."""

    def __init__(
        self,
        *,
        layers: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        value_head_dim: int | None = None,
        dtype: type = np.float32,
        opset: int = 23,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.value_head_dim = value_head_dim or head_dim
        self.dtype, self.layers = np.dtype(dtype), layers
        self.random = np.random.default_rng(0)
        self.graph = gs.Graph(opset=opset, name="decoder")
        self.ids = self._input(names.INPUT_IDS, np.int64, [BATCH, SEQUENCE])
        self.mask = self._input(names.ATTENTION_MASK, np.int64, [BATCH, TOTAL])
        self.positions = self._input(names.POSITION_IDS, np.int64, [BATCH, SEQUENCE])
        self.past = [
            tuple(
                self._input(name(layer), dtype, [BATCH, kv_heads, PAST, width])
                for name, width in (
                    (names.past_key, head_dim),
                    (names.past_value, self.value_head_dim),
                )
            )
            for layer in range(layers)
        ]

    def _input(self, name: str, dtype: type, shape: Sequence[int | str]) -> gs.Variable:
        tensor = gs.Variable(name, np.dtype(dtype), list(shape))
        self.graph.inputs.append(tensor)
        return tensor

    def output(self, tensor: gs.Variable, name: str) -> None:
        """Make a tensor a graph output under a name."""
        tensor.name = name
        self.graph.outputs.append(tensor)

    def const(self, values: Any, dtype: Any = np.int64) -> gs.Constant:
        name = f"const_{len(self.graph.tensors())}_{self.random.integers(1 << 60)}"
        return gs.Constant(name, np.asarray(values, dtype))

    def weight(self, *shape: int) -> gs.Constant:
        return self.const(self.random.standard_normal(shape) * 0.4, self.dtype)

    def op(
        self, op: str, *inputs: gs.Tensor, dtype: Any = None, shape: Any = None, **attrs: Any
    ) -> gs.Variable:
        """Append a node; dtype defaults to the first input's."""
        dtype = inputs[0].dtype if dtype is None else np.dtype(dtype)
        number = len(self.graph.nodes)
        output = gs.Variable(f"t{number}", dtype, shape)
        self.graph.nodes.append(gs.Node(op, f"n{number}", attrs, list(inputs), [output]))
        return output

    def length(self, tensor: gs.Tensor, axis: int) -> gs.Variable:
        """Return a dimension as a scalar, as tracing reads it."""
        shape = self.op("Shape", tensor, dtype=np.int64, start=axis, end=axis + 1)
        return self.op("Squeeze", shape, shape=[])


Mask = Callable[[Builder], gs.Variable]
Region = Callable[[Builder, gs.Variable], gs.Variable]


def slots(b: Builder) -> tuple[gs.Variable, gs.Variable]:
    """Return query slots [S,1] and key slots [1,T], from the past's shape as tracing does."""
    past, new = b.length(b.past[0][0], 2), b.length(b.ids, 1)
    zero, one = b.const(0), b.const(1)
    rows = b.op("Add", b.op("Range", zero, new, one), past)
    columns = b.op("Range", zero, b.op("Add", past, new), one)
    return b.op("Unsqueeze", rows, b.const([1])), b.op("Unsqueeze", columns, b.const([0]))


def padding(b: Builder) -> gs.Variable:
    """Return attention_mask as bool [B,1,1,T]."""
    return b.op(
        "Unsqueeze", b.op("Cast", b.mask, dtype=bool, to=onnx.TensorProto.BOOL), b.const([1, 2])
    )


def seen(b: Builder, *, window: int = 0, chunk: int = 0) -> gs.Variable:
    """Return causal [S,T], within a window or a chunk if asked."""
    row, column = slots(b)
    mask = b.op("LessOrEqual", column, row, dtype=bool)
    if window:
        start = b.op("Sub", row, b.const(window))
        mask = b.op("And", mask, b.op("Greater", column, start, dtype=bool))
    if chunk:
        size = b.const(chunk)
        same = b.op("Equal", b.op("Div", row, size), b.op("Div", column, size), dtype=bool)
        mask = b.op("And", mask, same)
    return mask


def bool_mask(**kind: int) -> Mask:
    """Return a builder of a bool mask, True = attend."""
    return lambda b: b.op("And", seen(b, **kind), padding(b), shape=[BATCH, 1, SEQUENCE, TOTAL])


def float_mask(lowest: float, **kind: int) -> Mask:
    """Return a builder of a float mask: 0 = attend, `lowest` = masked."""

    def build(b: Builder) -> gs.Variable:
        values = b.const(0, b.dtype), b.const(lowest, b.dtype)
        mask = bool_mask(**kind)(b)
        return b.op("Where", mask, *values, dtype=b.dtype, shape=[BATCH, 1, SEQUENCE, TOTAL])

    return build


def alibi_mask(b: Builder) -> gs.Variable:
    """Return a float mask that adds slope * slot to what is seen."""
    slopes = b.const(0.5 ** np.arange(b.heads).reshape(1, b.heads, 1, 1), b.dtype)
    _, column = slots(b)
    bias = b.op("Mul", b.op("Cast", column, dtype=b.dtype, to=b.dtype.type), slopes)
    return b.op(
        "Add", float_mask(float(np.finfo(b.dtype).min))(b), bias,
        shape=[BATCH, b.heads, SEQUENCE, TOTAL],
    )  # fmt: skip


def tables(
    b: Builder, width: int, *, repeat: str = "halves", theta: float = 100.0
) -> list[gs.Variable]:
    """Return cos and sin [B,1,S,width], every angle twice: in halves or in pairs."""
    inverse = b.const(theta ** -np.linspace(0, 1, width // 2), np.float32)
    position = b.op("Cast", b.positions, dtype=np.float32, to=onnx.TensorProto.FLOAT)
    angles = b.op("Mul", b.op("Unsqueeze", position, b.const([1, 3])), inverse)
    if repeat == "halves":
        angles = b.op("Concat", angles, angles, axis=-1)
    else:
        column = b.op("Unsqueeze", angles, b.const([4]))
        pairs = b.op("Concat", column, column, axis=-1)
        angles = b.op("Reshape", pairs, b.const([0, 0, 0, width]))
    return [
        b.op("Cast", b.op(name, angles), dtype=b.dtype, to=b.dtype.type) for name in ("Cos", "Sin")
    ]


def _slice(b: Builder, x: gs.Variable, start: int, end: int, step: int = 1) -> gs.Variable:
    return b.op("Slice", x, b.const([start]), b.const([end]), b.const([-1]), b.const([step]))


def half_rotary(cos: gs.Variable, sin: gs.Variable, width: int) -> Region:
    """Return what rotates the first `width` of each head [B,N,S,H], in halves."""

    def build(b: Builder, x: gs.Variable) -> gs.Variable:
        rotated = _slice(b, x, 0, width) if width < b.head_dim else x
        first, second = _slice(b, rotated, 0, width // 2), _slice(b, rotated, width // 2, width)
        turned = b.op("Concat", b.op("Neg", second), first, axis=-1)
        result = b.op("Add", b.op("Mul", rotated, cos), b.op("Mul", turned, sin))
        if width < b.head_dim:
            result = b.op("Concat", result, _slice(b, x, width, b.head_dim), axis=-1)
        return result

    return build


def interleaved_rotary(cos: gs.Variable, sin: gs.Variable) -> Region:
    """Return what rotates whole heads [B,N,S,H], in pairs."""

    def build(b: Builder, x: gs.Variable) -> gs.Variable:
        even, odd = _slice(b, x, 0, b.head_dim, 2), _slice(b, x, 1, b.head_dim, 2)
        pair = [b.op("Unsqueeze", t, b.const([4])) for t in (b.op("Neg", odd), even)]
        heads = x.shape[1]
        turned = b.op(
            "Reshape", b.op("Concat", *pair, axis=-1), b.const([0, heads, -1, b.head_dim])
        )
        return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))

    return build


def rotary(style: str, b: Builder) -> Region:
    """Return a rotation by name."""
    if style == "none":
        return lambda _b, x: x
    if style == "interleaved":
        return interleaved_rotary(*tables(b, b.head_dim, repeat="pairs"))
    width = b.head_dim // 2 if style == "partial" else b.head_dim
    return half_rotary(*tables(b, width), width)


def split_heads(b: Builder, x: gs.Variable, heads: int, width: int) -> gs.Variable:
    """[B,S,N*H] -> [B,N,S,H]."""
    split = b.op("Reshape", x, b.const([0, 0, heads, width]), shape=[BATCH, SEQUENCE, heads, width])
    return b.op("Transpose", split, perm=[0, 2, 1, 3], shape=[BATCH, heads, SEQUENCE, width])


def attention_layer(
    b: Builder,
    x: gs.Variable,
    layer: int,
    mask: gs.Variable | None,
    rotate_query: Region,
    rotate_key: Region | None = None,
    *,
    softcap: float = 0.0,
    sink: bool = False,
    window: int = 0,
    scale: float | None = None,
) -> gs.Variable:
    """Append one attention layer with its placeholder and present outputs."""
    hidden = x.shape[-1]
    sizes = ((b.heads, b.head_dim), (b.kv_heads, b.head_dim), (b.kv_heads, b.value_head_dim))
    q, k, v = (
        split_heads(
            b, b.op("MatMul", x, b.weight(hidden, n * w), shape=[BATCH, SEQUENCE, n * w]), n, w
        )
        for n, w in sizes
    )
    q, k = rotate_query(b, q), (rotate_key or rotate_query)(b, k)
    keys, values = (
        b.op("Concat", past, new, axis=-2, shape=[BATCH, b.kv_heads, TOTAL, past.shape[3]])
        for past, new in zip(b.past[layer], (k, v), strict=True)
    )
    b.output(keys, names.present_key(layer))
    b.output(values, names.present_value(layer))
    empty = gs.Variable.empty()
    sinks = b.const(b.random.standard_normal(b.heads), b.dtype) if sink else empty
    out = b.op(
        names.TRACE_ATTENTION, q, keys, values, mask if mask is not None else empty, sinks,
        shape=[BATCH, SEQUENCE, b.heads, b.value_head_dim],
        layer_index=layer, num_heads=b.heads, kv_num_heads=b.kv_heads, head_dim=b.head_dim,
        value_head_dim=b.value_head_dim, scale=scale or b.head_dim**-0.5, softcap=softcap,
        window_size=window, is_causal=1,
    )  # fmt: skip
    b.graph.nodes[-1].domain = names.TRACE_DOMAIN
    width = b.heads * b.value_head_dim
    merged = b.op("Reshape", out, b.const([0, 0, width]), shape=[BATCH, SEQUENCE, width])
    projected = b.op("MatMul", merged, b.weight(width, hidden), shape=[BATCH, SEQUENCE, hidden])
    return b.op("Add", x, projected, shape=[BATCH, SEQUENCE, hidden])


def decoder(
    *,
    masks: Sequence[Mask] = (bool_mask(),),
    windows: Sequence[int] = (),
    style: str = "half",
    head: str = "matmul",
    softcap: float = 0.0,
    sink: bool = False,
    **sizes: Any,
) -> gs.Graph:
    """Return a traced decoder with one layer per mask.

    Args:
        masks: What each layer masks.
        windows: What its attention call says of its window; none by default.
        style: Rotation, as for `rotary`.
        head: LM head, as for `lm_head`.
        softcap: Bound of the scores; 0 is none.
        sink: Whether heads have sinks.
        sizes: Arguments of `Builder`.
    """
    b = Builder(layers=len(masks), **sizes)
    hidden = 16
    x = b.op("Gather", b.weight(VOCAB, hidden), b.ids, axis=0, shape=[BATCH, SEQUENCE, hidden])
    rotation = rotary(style, b)
    for layer, (mask, window) in enumerate(zip(masks, windows or [0] * len(masks), strict=True)):
        x = attention_layer(
            b, x, layer, mask(b), rotation, softcap=softcap, sink=sink, window=window
        )
    b.output(lm_head(b, x, head), names.LOGITS)
    b.graph.outputs.insert(0, b.graph.outputs.pop())
    return b.graph


def pack_projections(
    graph: gs.Graph, *, order: Sequence[int] = (0, 1, 2), slices: bool = False
) -> None:
    """Turn the first three MatMuls, queries, keys and values, into one and a Split or Slices."""
    matmuls = [node for node in graph.nodes if node.op == "MatMul"][:3]
    x = matmuls[0].inputs[0]
    ordered = [matmuls[index] for index in order]
    widths = [node.inputs[1].shape[1] for node in ordered]
    weight = np.concatenate([node.inputs[1].values for node in ordered], axis=1)
    packed = gs.Variable("packed", x.dtype, [*x.shape[:2], sum(widths)])
    outputs = [node.outputs[0] for node in ordered]
    place = graph.nodes.index(matmuls[0])
    for node in ordered:
        node.outputs.clear()
        node.inputs.clear()
        graph.nodes.remove(node)
    nodes = [gs.Node("MatMul", "project", {}, [x, gs.Constant("weight", weight)], [packed])]
    if slices:
        ends = [*np.cumsum(widths)[:-1], np.iinfo(np.int64).max]
        for i, (start, end) in enumerate(zip(np.cumsum([0, *widths[:-1]]), ends, strict=True)):
            bounds = [
                gs.Constant(f"{name}{i}", np.array([value]))
                for name, value in (("start", start), ("end", end), ("axis", 2), ("step", 1))
            ]
            nodes.append(gs.Node("Slice", f"cut{i}", {}, [packed, *bounds], [outputs[i]]))
    else:
        sizes = gs.Constant("widths", np.array(widths))
        nodes.append(gs.Node("Split", "split", {"axis": -1}, [packed, sizes], outputs))
    graph.nodes[place:place] = nodes


def lm_head(b: Builder, x: gs.Variable, kind: str) -> gs.Variable:
    """Append an LM head: matmul, gemm (tied weight as it is), softcap, or odd (nothing known)."""
    hidden, logits = x.shape[-1], [BATCH, SEQUENCE, VOCAB]
    if kind == "gemm":
        flat = b.op("Reshape", x, b.const([-1, hidden]), shape=["tokens", hidden])
        out = b.op("Gemm", flat, b.weight(VOCAB, hidden), transB=1, shape=["tokens", VOCAB])
        size = b.op("Shape", x, dtype=np.int64, start=0, end=2)
        return b.op("Reshape", out, b.op("Concat", size, b.const([VOCAB]), axis=0), shape=logits)
    out = b.op("MatMul", x, b.weight(hidden, VOCAB), shape=logits)
    if kind == "softcap":
        cap = b.const(2.0, b.dtype)
        out = b.op("Mul", b.op("Tanh", b.op("Div", out, cap)), cap, shape=logits)
    if kind == "odd":
        out = b.op("CumSum", out, b.const(2), shape=logits)
    return out


def normed_decoder(
    *,
    normed: Sequence[str] = ("query", "key"),
    epsilons: tuple[float, float] = (0.5, 0.5),
    order: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> gs.Graph:
    """Return a decoder of one layer with a packed projection and norms of its heads.

    Args:
        normed: Whose heads have a norm.
        epsilons: Of the norm of query and of key.
        order: Of query, key and value in the projection.
        options: Arguments of `decoder`.
    """
    graph = decoder(**options)
    pack_projections(graph, order=order)
    random = np.random.default_rng(5)
    transposes = find(graph, "Transpose")[:2]
    for name, transpose, epsilon in zip(("query", "key"), transposes, epsilons, strict=True):
        if name not in normed:
            continue
        heads = transpose.inputs[0]
        weight = gs.Constant(f"{name}.norm", random.standard_normal(heads.shape[-1]).astype("f"))
        output = gs.Variable(f"{name}.normed", heads.dtype, heads.shape)
        attrs = {"axis": -1, "epsilon": epsilon}
        node = gs.Node("RMSNormalization", f"{name}.norm", attrs, [heads, weight], [output])
        graph.nodes.insert(graph.nodes.index(transpose), node)
        transpose.inputs[0] = output
    return graph


class _Placeholder(OpRun):
    """The placeholder in float64."""

    op_domain = names.TRACE_DOMAIN
    __name__ = names.TRACE_ATTENTION

    def _run(self, query, key, value, mask=None, sink=None, **attrs):  # type: ignore[no-untyped-def]
        attributes = reference.Attributes(
            attrs["num_heads"],
            attrs["kv_num_heads"],
            attrs["scale"],
            attrs["softcap"],
            causal=False,
        )
        past = key.shape[2] - query.shape[2]
        if mask is not None and mask.dtype == bool:
            mask = np.where(mask, 0.0, -np.inf)
        q, k, v = (array.astype(np.float64) for array in (query, key, value))
        out = reference.attention(attributes, q, k, v, past, bias=mask, head_sink=sink)
        shape = (q.shape[0], q.shape[2], attrs["num_heads"], v.shape[3])
        return (out.reshape(shape).astype(query.dtype),)


class Attention(_Placeholder):
    """Named as the evaluator looks it up."""


def run_traced(graph: gs.Graph, feeds: dict[str, npt.NDArray]) -> dict[str, npt.NDArray]:
    """Run a graph with placeholders, in numpy."""
    model = gs.export_onnx(graph)
    session = ReferenceEvaluator(model, new_ops=[Attention])
    wanted = {name: feeds[name] for name in session.input_names}
    return dict(zip(session.output_names, session.run(None, wanted), strict=True))


def open_session(graph: gs.Graph, folder: Path) -> ort.InferenceSession:
    """Write a rewritten graph to a file and open it, with the op library."""
    path = folder / "model.onnx"
    write_graph(graph, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    custom_ops.register(options)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(
    session: ort.InferenceSession, feeds: dict[str, npt.NDArray], **more: npt.NDArray
) -> dict[str, npt.NDArray]:
    """Run a session on those feeds that it takes."""
    taken = {entry.name for entry in session.get_inputs()}
    outputs = [entry.name for entry in session.get_outputs()]
    wanted = {name: value for name, value in feeds.items() if name in taken} | more
    return dict(zip(outputs, session.run(None, wanted), strict=True))


def make_feeds(
    graph: gs.Graph, mask: npt.NDArray, new: int, *, capacity: int = 0
) -> dict[str, npt.NDArray]:
    """Return feeds for a mask [batch, past + new], with random caches.

    A capacity makes shared buffers of that many slots: the past in front, NaN behind it.
    """
    random = np.random.default_rng(3)
    batch, total = mask.shape
    positions = np.clip(np.cumsum(mask, 1) - 1, 0, None)
    feeds = {
        names.INPUT_IDS: random.integers(0, VOCAB, (batch, new)),
        names.ATTENTION_MASK: mask.astype(np.int64),
        names.POSITION_IDS: positions[:, total - new :],
    }
    for tensor in graph.inputs:
        if tensor.name.startswith("past_key_values."):
            shape = (batch, tensor.shape[1], total - new, tensor.shape[3])
            cache = random.standard_normal(shape).astype(tensor.dtype)
            if capacity:
                free = np.full((*shape[:2], capacity - shape[2], shape[3]), np.nan, tensor.dtype)
                cache = np.concatenate([cache, free], 2)
            feeds[tensor.name] = cache
    return feeds


def make_mask(past: int, new: int) -> npt.NDArray[np.int64]:
    """Return three rows: all seen, left padding, and a hole."""
    mask = np.ones((3, past + new), np.int64)
    mask[1, : (past + new) // 3] = 0
    mask[2, (past + new) // 3 : (past + new) // 2] = 0
    return mask
