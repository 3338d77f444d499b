"""Rule `standard`: the traced placeholder becomes operators that plain ONNX Runtime has.

Letters: B batch, N query heads, K key/value heads, S new tokens, T past and new, H and Hv widths.

1. From opset 23 on, one ONNX Attention node. Its mask is always spelled as numbers, the lowest
   finite one for a masked slot, so a row in which all is masked (a padding query) stays finite.
2. Below opset 23, and with a softcap, head sinks or a float32 mask of a float16 model at any opset
   (the standard says softcap after the mask, Hugging Face before; the others it does not have):
   MatMul, Softmax, MatMul. The S queries of the N/K heads that share a key/value head form one
   matrix, so no head is repeated: [B,N,S,H] -> [B,K,N/K*S,H]. Softmax runs in float32.

The caches stay Concats, as traced.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    as_bias,
    cast,
    find,
    optional_input,
    replace_uses,
)

NAME = "standard"
_ATTENTION_OPSET = 23


def apply(editor: Editor) -> Outcome:
    """Replace every placeholder."""
    refusals = []
    biases: dict[tuple[str, bool], gs.Tensor] = {}
    nodes = find(editor.graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    for node in nodes:
        if (reason := _check(node)) is not None:
            refusals.append(Refusal(NAME, node.name, reason))
        else:
            _rewrite(editor, node, biases)
    return Outcome(len(nodes) - len(refusals), tuple(refusals))


def _check(node: gs.Node) -> str | None:
    heads, kv_heads = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    if kv_heads == 0 or heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} key/value heads"
    if optional_input(node, 3) is None:
        return "it has no mask operand; tracing must spell the mask out"
    return None


def _rewrite(editor: Editor, node: gs.Node, biases: dict[tuple[str, bool], gs.Tensor]) -> None:
    query, key, value, mask = node.inputs[:4]
    decomposed = (
        editor.graph.opset < _ATTENTION_OPSET
        or node.attrs["softcap"] != 0
        or optional_input(node, 4) is not None
        or (mask.dtype == np.float32 != query.dtype)  # MPT's ALiBi, which float16 would round
    )
    if (mask.name, decomposed) not in biases:
        dtype = np.dtype(np.float32) if decomposed else query.dtype
        biases[mask.name, decomposed] = _finite_bias(editor, mask, dtype)
    bias = biases[mask.name, decomposed]
    if decomposed:
        heads = _decompose(editor, node, bias)
    else:
        attrs = {"scale": float(node.attrs["scale"])}
        heads = editor.add("Attention", [query, key, value, bias], attrs, dtype=query.dtype)
    output = editor.add(
        "Transpose", [heads], {"perm": [0, 2, 1, 3]},
        dtype=query.dtype, shape=node.outputs[0].shape,
    )  # fmt: skip
    replace_uses(node.outputs[0], output)
    node.inputs.clear()
    node.outputs.clear()


def _finite_bias(editor: Editor, mask: gs.Tensor, dtype: np.dtype) -> gs.Tensor:
    """Spell a mask as numbers; -inf, which a model's float mask may hold, becomes the lowest."""
    bias = as_bias(editor, mask, dtype)
    if mask.dtype == bool:
        return bias
    lowest = editor.constant(np.array(np.finfo(dtype).min, dtype))
    return editor.add("Max", [bias, lowest], dtype=dtype, shape=bias.shape)


def _decompose(editor: Editor, node: gs.Node, bias: gs.Tensor) -> gs.Variable:
    """Return softmax(query . key) . value, [B,N,S,Hv]."""
    query, key, value = node.inputs[:3]
    sink, dtype = optional_input(node, 4), query.dtype
    heads, kv_heads = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    batch, new = (editor.dimension(names.INPUT_IDS, axis) for axis in (0, 1))
    total = editor.dimension(names.ATTENTION_MASK, 1)

    # 1. Scores, as one matrix per key/value head.
    scale = editor.constant(np.array(node.attrs["scale"], dtype))
    query = editor.add("Mul", [query, scale], dtype=dtype)
    query = _reshape(editor, query, 0, kv_heads, -1, node.attrs["head_dim"])
    transposed = editor.add("Transpose", [key], {"perm": [0, 1, 3, 2]}, dtype=dtype)
    scores = editor.add("MatMul", [query, transposed], dtype=dtype)

    # 2. Softcap, mask and softmax, per query head.
    scores = cast(editor, scores, np.float32)
    if node.attrs["softcap"]:
        cap = editor.constant(np.array(node.attrs["softcap"], np.float32))
        scores = editor.add("Div", [scores, cap], dtype=np.float32)
        scores = editor.add("Tanh", [scores], dtype=np.float32)
        scores = editor.add("Mul", [scores, cap], dtype=np.float32)
    scores = _reshape(editor, scores, batch, heads, new, total)
    scores = editor.add("Add", [scores, bias], dtype=np.float32)
    if sink is not None:
        column = _shape(editor, batch, heads, new, 1)
        scores = _append_sink(editor, scores, sink, column)
    weights = editor.add("Softmax", [scores], {"axis": -1}, dtype=np.float32)
    if sink is not None:
        bounds = [editor.ints(bound) for bound in (0, -1, -1)]
        weights = editor.add("Slice", [weights, *bounds], dtype=np.float32)

    # 3. The weighted values, per key/value head again.
    weights = cast(editor, weights, dtype)
    group = editor.ints(heads // kv_heads)
    rows = editor.add("Mul", [new, group], dtype=np.int64, shape=[1])
    weights = _reshape(editor, weights, batch, kv_heads, rows, total)
    output = editor.add("MatMul", [weights, value], dtype=dtype)
    return _reshape(editor, output, batch, heads, new, node.attrs["value_head_dim"])


def _append_sink(
    editor: Editor, scores: gs.Variable, sink: gs.Tensor, shape: gs.Tensor
) -> gs.Variable:
    """Append the sink's score to every row: it takes weight and gives no value."""
    sink = cast(editor, sink, np.float32)
    sink = editor.add("Reshape", [sink, editor.ints(1, -1, 1, 1)], dtype=np.float32)
    column = editor.add("Expand", [sink, shape], dtype=np.float32)
    return editor.add("Concat", [scores, column], {"axis": -1}, dtype=np.float32)


def _reshape(editor: Editor, tensor: gs.Tensor, *dimensions: int | gs.Tensor) -> gs.Variable:
    shape = _shape(editor, *dimensions)
    return editor.add("Reshape", [tensor, shape], dtype=tensor.dtype)


def _shape(editor: Editor, *dimensions: int | gs.Tensor) -> gs.Tensor:
    """Return dimensions, numbers or int64 [1], as one int64 [len(dimensions)]."""
    if all(isinstance(dimension, int) for dimension in dimensions):
        return editor.ints(*dimensions)
    parts = [editor.ints(d) if isinstance(d, int) else d for d in dimensions]
    return editor.add("Concat", parts, {"axis": 0}, dtype=np.int64, shape=[len(parts)])
