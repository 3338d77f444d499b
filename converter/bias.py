"""The bias of a linear layer: what an Add behind the product adds."""

import onnx_ir as ir


def bias_behind(product: ir.Value, width: int) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a constant [width] behind a product that nothing else reads, and that."""
    add = only_reader(product)
    if add is None or add.op_type != "Add":
        return None
    bias = next((value for value in add.inputs if value is not product), None)
    if bias is None or bias.const_value is None or bias.const_value.shape != (width,):
        return None
    return add, bias


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads a value, once; None if the graph returns it too."""
    uses = list(value.uses())
    return uses[0][0] if len(uses) == 1 and not value.is_graph_output() else None
