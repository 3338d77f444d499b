"""A check of graphs for CUDA: can a decode step be captured as a CUDA graph?

ONNX Runtime captures a run only if no tensor moves between host and device inside it. Kernels on
CUDA read shapes, starts and axes in host memory (`_HOST_INPUTS`), and Shape and Size write there.
What computes from those alone, from constants and from graph inputs, ONNX Runtime leaves on the CPU
(core/framework/fallback_cpu_capability.cc); everything else runs on the device. This module does
the same sum over a finished graph, and says where a tensor would have to move.
"""

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Refusal, producer, upstream

NAME = "host_nodes"
_SMALL = 100
"""Elements of a constant that ONNX Runtime lets a node on the CPU read."""
_HOST_OUTPUTS = frozenset({"Shape", "Size"})
_HOST_INPUTS = {
    "Clip": {1, 2}, "ConstantOfShape": {0}, "CumSum": {1}, "Expand": {1}, "OneHot": {1},
    "Pad": {1, 2, 3}, "Range": {0, 1, 2}, "ReduceMax": {1}, "ReduceMean": {1}, "ReduceMin": {1},
    "ReduceSum": {1}, "Reshape": {1}, "Slice": {1, 2, 3, 4}, "Split": {1}, "Squeeze": {1},
    "Tile": {1}, "TopK": {1}, "Trilu": {1}, "Unsqueeze": {1},
    names.OP_NAME: {names.FLASH_ATTENTION_INPUTS.index("kernels")},
}  # fmt: skip


def check(graph: gs.Graph) -> tuple[Refusal, ...]:
    """Return the first tensor that would move in each direction; none if a step can be captured."""
    host: set[str] = set()
    on_cpu: set[int] = set()
    nodes = upstream(graph.outputs)
    for node in nodes:
        if node.op in _HOST_OUTPUTS:
            host |= {tensor.name for tensor in node.outputs}
        elif _stays_on_cpu(node, host):
            on_cpu.add(id(node))
            host |= {tensor.name for tensor in node.outputs}
    found: dict[str, Refusal] = {}
    for node in nodes:
        if id(node) in on_cpu or node.op in _HOST_OUTPUTS:
            continue
        for index, tensor in enumerate(node.inputs):
            reads_host = index in _HOST_INPUTS.get(node.op, ())
            if producer(tensor) is None or reads_host == (tensor.name in host):
                continue
            where = "computed on the device" if reads_host else "computed on the CPU"
            reason = (
                f"{node.op} reads {tensor.name}, which is {where}, so ONNX Runtime cannot capture "
                f"decode steps as a CUDA graph; run the bundle with --no-cuda-graph"
            )
            found.setdefault(where, Refusal(NAME, node.name, reason))
    return tuple(found.values())


def _stays_on_cpu(node: gs.Node, host: set[str]) -> bool:
    """Tell whether a node computes from what lies on the host, so that it runs there too."""
    inputs = [tensor for tensor in node.inputs if not tensor.is_empty()]
    if not any(tensor.name in host for tensor in inputs):
        return False
    for index, tensor in enumerate(node.inputs):
        if tensor.is_empty() or (producer(tensor) is None and _is_small(tensor)):
            continue
        if tensor.name not in host or index in _HOST_INPUTS.get(node.op, ()):
            return False
    return True


def _is_small(tensor: gs.Tensor) -> bool:
    """Tell whether ONNX Runtime lets a node on the CPU read a constant or graph input."""
    if not isinstance(tensor, gs.Constant):
        return True
    size = 1
    for dimension in tensor.shape:
        size *= dimension
    return size <= _SMALL
