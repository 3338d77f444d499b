"""Arithmetic in bfloat16, which ONNX Runtime's CPU provider lacks, is done in float32.

A float32 or float16 model may round some numbers to bfloat16 all the same (Falcon's ALiBi). One
operation in float32, rounded afterwards, gives exactly what it gives in bfloat16.
"""

import onnx_ir as ir

_ARITHMETIC = {"Add", "Div", "Mul", "Neg", "Sub"}


def compute_in_float32(graph: ir.Graph) -> int:
    """Put casts around every bfloat16 operation; returns how many there were."""
    nodes = [
        node
        for node in graph
        if node.op_type in _ARITHMETIC and node.outputs[0].dtype == ir.DataType.BFLOAT16
    ]
    for node in nodes:
        tape = ir.tape.Tape()
        wide = [tape.op("Cast", [value], {"to": ir.DataType.FLOAT}) for value in node.inputs]
        result = tape.op("Cast", [tape.op(node.op_type, wide)], {"to": ir.DataType.BFLOAT16})
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], tape.nodes, node.outputs, [result]
        )
    return len(nodes)
