"""Rule `tidy`: one node per distinct computation, and none that computes nothing.

1. A Constant node becomes a constant.
2. An Identity, or a Slice that cuts nothing, disappears; its input takes the name of a graph
   output if it had one.
3. Two nodes with equal operator, attributes and inputs become one. Tracing repeats cos, sin and
   mask work per layer; the rules after this one then meet each mask once.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    attributes_key,
    constant_key,
    find,
    is_external,
    replace_uses,
    sort,
    write_instead,
)

NAME = "tidy"
_INT64_MAX = np.iinfo(np.int64).max
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}


def apply(editor: Editor) -> Outcome:
    """Simplify the whole graph and leave it in topological order."""
    graph = editor.graph
    count = _lift_constants(graph) + _drop_identities(graph)
    sort(graph)
    count += _merge_duplicates(graph)
    sort(graph)
    return Outcome(count)


def _lift_constants(graph: gs.Graph) -> int:
    nodes = [node for node in find(graph, "Constant") if "value" in node.attrs]
    for node in nodes:
        output = node.outputs[0]
        values = node.attrs["value"].values
        node.outputs.clear()
        output.to_constant(values)
    return len(nodes)


def _drop_identities(graph: gs.Graph) -> int:
    outputs = {tensor.name for tensor in graph.outputs}
    count = 0
    for node in [*find(graph, "Identity"), *filter(_cuts_nothing, find(graph, "Slice"))]:
        source, target = node.inputs[0], node.outputs[0]
        if target.name in outputs:
            if not source.inputs or source.name in outputs:
                continue  # an input or another output under a second name: Identity is the only way
            node.outputs.clear()
            write_instead(source, target)
            replace_uses(source, target)
        else:
            replace_uses(target, source)
        node.inputs.clear()
        count += 1
    return count


def _cuts_nothing(node: gs.Node) -> bool:
    """Tell whether a Slice runs from 0 to the largest number in steps of 1."""
    bounds = [tensor for index, tensor in enumerate(node.inputs) if index in (1, 2, 4)]
    if not all(isinstance(tensor, gs.Constant) and not is_external(tensor) for tensor in bounds):
        return False
    starts, ends, *steps = (tensor.values for tensor in bounds)
    return not starts.any() and (ends == _INT64_MAX).all() and all((s == 1).all() for s in steps)


def _merge_duplicates(graph: gs.Graph) -> int:
    outputs = {tensor.name for tensor in graph.outputs}
    first: dict[object, gs.Node] = {}
    count = 0
    for node in graph.nodes:  # in topological order, so inputs are merged before their readers
        if node.op in _RANDOM or any(tensor.name in outputs for tensor in node.outputs):
            continue
        inputs = tuple(constant_key(tensor) for tensor in node.inputs)
        key = (node.op, node.domain, attributes_key(node), inputs, len(node.outputs))
        kept = first.setdefault(key, node)
        if kept is not node:
            for tensor, same in zip(node.outputs, kept.outputs, strict=True):
                replace_uses(tensor, same)
            count += 1
    return count
