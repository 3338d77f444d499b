"""Rule `num_logits_to_keep`: the LM head sees only the positions whose logits are wanted.

Adds the overridable initializer num_logits_to_keep (int64 scalar, 0 = all positions) and

    Slice(x, starts=[-num_logits_to_keep], ends=[INT64_MAX], axes=[1])

in front of the LM head, the last MatMul, MatMulNBits or Gemm before `logits`; between the two may
lie what works on each position alone: Cast, a bias, a softcap, a Reshape around a Gemm. If
something else lies there, the logits themselves are sliced.

onnx-graphsurgeon cannot hold an initializer that is an input as well: it drops the input when
reading. `kvconv.converter.rewrite.io.write_graph` puts it back.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, Refusal, producer, write_instead

NAME = "num_logits_to_keep"
KEPT_LENGTH = "num_logits"
"""Dimension 1 of the logits."""
_INT64_MAX = np.iinfo(np.int64).max
_PER_POSITION = {"Cast", "Add", "Sub", "Mul", "Div", "Tanh", "Neg"}


def apply(editor: Editor) -> Outcome:
    """Slice the hidden states once; does nothing to a graph that has the initializer."""
    graph = editor.graph
    if is_done(graph):
        return Outcome(0)
    logits = next((t for t in graph.outputs if t.name == names.LOGITS), None)
    if logits is None:
        return Outcome(0, (Refusal(NAME, names.LOGITS, "the graph has no such output"),))
    head = _pattern(logits)
    if isinstance(head, str):
        _slice_logits(editor, logits)
        refusal = Refusal(NAME, names.LOGITS, f"sliced behind the LM head, because {head}")
        return Outcome(1, (refusal,))
    _rewrite(editor, head, logits)
    return Outcome(1)


def is_done(graph: gs.Graph) -> bool:
    """Tell whether the graph reads num_logits_to_keep, as every rewritten graph does."""
    return any(t.name == names.NUM_LOGITS_TO_KEEP for node in graph.nodes for t in node.inputs)


def _pattern(logits: gs.Variable) -> list[gs.Node] | str:
    """Return the nodes from the logits up to the LM head's input, or why they are not known."""
    path: list[gs.Node] = []
    tensor = logits
    while (node := producer(tensor)) is not None:
        path.append(node)
        if node.op == "MatMul":
            return path if _is_weight(node.inputs[1], 2) else f"{node.name} has no constant weight"
        if node.op == names.MATMUL_NBITS:
            return path
        if node.op == "Gemm":
            return _check_gemm(path)
        operands = [t for t in node.inputs if isinstance(t, gs.Variable) and not t.is_empty()]
        if node.op in _PER_POSITION and _same_for_all_positions(node) and len(operands) == 1:
            tensor = operands[0]
        elif _is_gemm_output(node):
            tensor = node.inputs[0]
        else:
            return f"{node.name} ({node.op}) lies between the LM head and the logits"
    return f"{tensor.name} has no producer"


def _is_gemm_output(node: gs.Node) -> bool:
    above = producer(node.inputs[0]) if node.op == "Reshape" else None
    return above is not None and above.op == "Gemm"


def _check_gemm(path: list[gs.Node]) -> list[gs.Node] | str:
    """Accept Reshape -> Gemm -> Reshape, [B,S,D] -> [B*S,D] -> [B*S,V] -> [B,S,V]."""
    gemm = path[-1]
    before = producer(gemm.inputs[0])
    if len(path) < 2 or path[-2].op != "Reshape":
        return f"{gemm.name} is not followed by a Reshape"
    if before is None or before.op != "Reshape" or gemm.attrs.get("transA", 0):
        return f"{gemm.name} is not preceded by a Reshape"
    hidden = before.inputs[0]
    if hidden.shape is None or len(hidden.shape) != 3:
        return f"{hidden.name} is not known to be [batch_size, sequence_length, hidden_size]"
    if not _is_weight(gemm.inputs[1], 2):
        return f"{gemm.name} has no constant weight"
    return [*path, before]


def _same_for_all_positions(node: gs.Node) -> bool:
    """Tell whether an elementwise node's constants broadcast over the sequence."""
    constants = [t for t in node.inputs if isinstance(t, gs.Constant)]
    return all(len(t.shape) <= 1 or set(t.shape[:-1]) == {1} for t in constants)


def _is_weight(tensor: gs.Tensor, rank: int) -> bool:
    return isinstance(tensor, gs.Constant) and len(tensor.shape) == rank


def _rewrite(editor: Editor, path: list[gs.Node], logits: gs.Variable) -> None:
    last = path[-1]
    hidden = last.inputs[0]
    kept = _slice(editor, hidden)
    last.inputs[0] = kept
    if last.op == "Reshape":  # around a Gemm, whose shapes speak of all positions
        gemm, after = path[-2], path[-3]
        weight = gemm.inputs[1].shape
        vocab_size, hidden_size = weight if gemm.attrs.get("transB", 0) else weight[::-1]
        flat = editor.add("Reshape", [kept, editor.ints(-1, hidden_size)], dtype=kept.dtype)
        gemm.inputs[0] = flat
        leading = editor.add("Shape", [kept], {"end": 2}, dtype=np.int64, shape=[2])
        shape = [leading, editor.ints(vocab_size)]
        after.inputs[1] = editor.add("Concat", shape, {"axis": 0}, dtype=np.int64, shape=[3])
    for node in path:
        for tensor in node.outputs:
            tensor.shape = None
    logits.shape = [names.DIM_BATCH, KEPT_LENGTH, _vocab_size(path)]


def _vocab_size(path: list[gs.Node]) -> int | str:
    """Return the width of the logits from the LM head's weight."""
    head = next(node for node in path if node.op in ("MatMul", "Gemm", names.MATMUL_NBITS))
    if head.op == names.MATMUL_NBITS:
        return int(head.attrs["N"])
    return head.inputs[1].shape[0 if head.attrs.get("transB", 0) else 1]


def _slice_logits(editor: Editor, logits: gs.Variable) -> None:
    shape = [names.DIM_BATCH, names.DIM_SEQUENCE, None] if logits.shape is None else logits.shape
    everything = gs.Variable(editor.fresh("logits"), logits.dtype, shape)
    write_instead(logits, everything)
    write_instead(_slice(editor, everything), logits)
    logits.shape = [shape[0], KEPT_LENGTH, shape[2]]


def _slice(editor: Editor, tensor: gs.Variable) -> gs.Variable:
    keep = gs.Constant(names.NUM_LOGITS_TO_KEEP, np.zeros((), np.int64))
    if editor.provider == "cuda":
        # The same from a Shape, which keeps it on the host: see `host_nodes`.
        length = editor.dimension(names.INPUT_IDS, 1)
        zero = editor.add("Mul", [length, editor.ints(0)], dtype=np.int64, shape=[1])
        start = editor.add("Sub", [zero, keep], dtype=np.int64, shape=[1])
    else:
        negative = editor.add("Neg", [keep], dtype=np.int64, shape=[])
        start = editor.add("Reshape", [negative, editor.ints(1)], dtype=np.int64, shape=[1])
    bounds = [start, editor.ints(_INT64_MAX), editor.ints(1)]
    shape = None if tensor.shape is None else [tensor.shape[0], KEPT_LENGTH, tensor.shape[2]]
    return editor.add("Slice", [tensor, *bounds], dtype=tensor.dtype, shape=shape)
