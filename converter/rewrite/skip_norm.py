"""Rule `skip_norm`: a residual Add and the norm behind it become one node.

    before   sum = Add(input, skip) [.., width]     RMSNormalization(sum, weight)
    after    kvconv::SkipRMSNormalization(input, skip, weight) -> output, sum

float32 only. ONNX Runtime's own SkipSimplifiedLayerNormalization is slower than the two nodes for
more than a few tokens, so graphs without kvconv's ops keep the two.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, find, producer, replace_uses

NAME = "skip_norm"


def apply(editor: Editor) -> Outcome:
    """Replace every norm of a sum of two tensors of its shape."""
    outputs = {tensor.name for tensor in editor.graph.outputs}
    count = 0
    for norm in find(editor.graph, "RMSNormalization"):
        add = _pattern(norm)
        if add is not None and not outputs & {add.outputs[0].name, norm.outputs[0].name}:
            _rewrite(editor, norm, add)
            count += 1
    return Outcome(count)


def _pattern(norm: gs.Node) -> gs.Node | None:
    """Return the Add whose sum is normed over its last axis."""
    add = producer(norm.inputs[0])
    if add is None or add.op != "Add" or norm.attrs.get("axis", -1) != -1:
        return None
    shape = add.outputs[0].shape
    known = shape is not None and all(t.shape == shape for t in add.inputs)
    is_float32 = all(t.dtype == np.float32 for t in (*add.inputs, norm.inputs[1]))
    return add if known and is_float32 else None


def _rewrite(editor: Editor, norm: gs.Node, add: gs.Node) -> None:
    outputs = [
        gs.Variable(editor.fresh(stem), np.dtype(np.float32), old.shape)
        for stem, old in (("norm", norm.outputs[0]), ("sum", add.outputs[0]))
    ]
    editor.add_node(
        names.SKIP_RMS_NORMALIZATION,
        [*add.inputs, norm.inputs[1]],
        outputs,
        {"epsilon": norm.attrs.get("epsilon", 1e-5)},
        domain=names.OP_DOMAIN,
    )
    replace_uses(norm.outputs[0], outputs[0])
    replace_uses(add.outputs[0], outputs[1])
    norm.inputs.clear()
