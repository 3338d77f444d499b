"""Makes a traced graph small: constants folded, repeated work shared, dead nodes gone.

Only public passes of onnx-ir and onnxscript, in an order that matters, and none that would read a
weight: what they see as constant is at most `INLINE_BYTES` large.
"""

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from kvconv.converter.bfloat16 import compute_in_float32
from kvconv.converter.weights import INLINE_BYTES

_WRAPPER_PREFIX = "model."


def simplify(model: ir.Model) -> None:
    """Shrink a traced model in place; outputs keep their names and values."""
    _name_weights_as_the_checkpoint(model.graph)
    compute_in_float32(model.graph)
    passes = ir.passes.Sequential(
        common.InlinePass(),
        _FoldSmallConstants(),
        # Constants become initializers, and equal ones become one: only then do the expressions
        # over them look alike to the elimination that follows.
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(size_limit=INLINE_BYTES),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    )
    passes(model)


class _FoldSmallConstants(ir.passes.InPlacePass):
    """Constant folding that leaves weights alone, whatever the operator."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        result = optimizer.fold_constants(
            model,
            input_size_limit=INLINE_BYTES,
            output_size_limit=INLINE_BYTES,
            should_fold=lambda node: False if _reads_weight(node) else None,
        )
        return ir.passes.PassResult(model, bool(result.modified))


def _reads_weight(node: ir.Node) -> bool:
    tensors = (value.const_value for value in node.inputs if value is not None)
    return any(tensor is not None and tensor.nbytes > INLINE_BYTES for tensor in tensors)


def _name_weights_as_the_checkpoint(graph: ir.Graph) -> None:
    """Drop the prefix that the traced wrapper gave every weight."""
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = value.name.removeprefix(_WRAPPER_PREFIX)
        if name != value.name and name not in graph.initializers:
            value.name = name
