"""Packs linear layers that read the same numbers: query, key and value; gate and up.

    before   MatMul(x, W1) [+ b1]    MatMul(x, W2) [+ b2]   ...
    after    Split(MatMul(x, [W1 | W2 ...]) [+ [b1 | b2 ...]])

Only layers of one module are packed: in a model whose attention and feed-forward part read the
same norm, later rules take q, k and v in one piece, and gate and up in another. The weights stay
where they are until they are written.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from kvconv.converter.bias import bias_behind
from kvconv.converter.linear_weight import LinearWeight


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer.

    Attributes:
        matmul: x [.., in_features] times the weight.
        weight: Read by this MatMul only.
        tensor: What the weight holds.
        add: Adds the bias; None if there is none.
        bias: [out_features], or None.
    """

    matmul: ir.Node
    weight: ir.Value
    tensor: LinearWeight
    add: ir.Node | None = None
    bias: ir.Value | None = None

    @property
    def output(self) -> ir.Value:
        """What the rest of the graph reads."""
        return (self.add or self.matmul).outputs[0]

    @property
    def width(self) -> int:
        """The number of out_features."""
        return sum(self.tensor.widths)


def pack(model: ir.Model) -> int:
    """Pack what `lay_out` made of linear layers, in place; returns how many packs it made."""
    groups: dict[object, list[_Linear]] = defaultdict(list)
    for node in model.graph:
        linear = _pattern(node)
        if linear is not None:
            module, _, _ = _words(linear.tensor)
            groups[id(node.inputs[0]), module, linear.tensor.dtype].append(linear)
    packs = [linears for linears in groups.values() if len(linears) > 1]
    for linears in packs:
        _rewrite(model.graph, linears)
    return len(packs)


def _words(tensor: LinearWeight) -> tuple[str, str, str]:
    """Split `layers.0.self_attn.q_proj.weight` into layers.0.self_attn, q_proj and weight."""
    path, _, leaf = (tensor.name or "").rpartition(".")
    module, _, layer = path.rpartition(".")
    return module, layer, leaf


def _pattern(node: ir.Node) -> _Linear | None:
    """Return the linear layer that a MatMul is, if its weight is nothing else's."""
    if node.domain or node.op_type != "MatMul":
        return None
    weight, product = node.inputs[1], node.outputs[0]
    tensor = None if weight is None else weight.const_value
    if weight is None or not isinstance(tensor, LinearWeight) or len(weight.uses()) != 1:
        return None
    linear = _Linear(node, weight, tensor)
    if (found := bias_behind(product, linear.width)) is not None:
        linear = _Linear(node, weight, tensor, *found)
    return None if linear.output.is_graph_output() else linear


def _rewrite(graph: ir.Graph, linears: list[_Linear]) -> None:
    first = linears[0]
    x = first.matmul.inputs[0]
    assert x is not None
    packed = _side_by_side([linear.tensor for linear in linears])
    kind = ir.TensorType(packed.dtype)
    weight = ir.Value(name=packed.name, type=kind, shape=packed.shape, const_value=packed)
    graph.register_initializer(weight)
    tape = ir.tape.Tape()
    output = tape.op("MatMul", [x, weight])
    if any(linear.bias is not None for linear in linears):
        bias = ir.tensor(_biases(linears), name=f"{packed.name}.bias")
        output = tape.op("Add", [output, tape.initializer(bias)])
    for node in tape.nodes:
        node.outputs[0].type = kind
        if x.shape is not None:
            node.outputs[0].shape = ir.Shape([*x.shape[:-1], packed.shape[1]])
    widths = [linear.width for linear in linears]
    sizes = ir.tensor(widths, dtype=ir.DataType.INT64, name=f"{packed.name}.widths")
    parts = tape.op_multi_out(
        "Split",
        [output, tape.initializer(sizes)],
        attributes={"axis": -1},
        num_outputs=len(widths),
    )
    for initializer in tape.initializers:
        graph.register_initializer(initializer)
    old = [node for linear in linears for node in (linear.matmul, linear.add) if node is not None]
    ir.convenience.replace_nodes_and_values(
        graph, first.matmul, old, tape.nodes, [linear.output for linear in linears], parts
    )
    for linear in linears:
        for initial in (linear.weight, linear.bias):
            if initial is not None and not initial.uses() and initial.name is not None:
                graph.initializers.pop(initial.name, None)


def _side_by_side(tensors: list[LinearWeight]) -> LinearWeight:
    """Return one weight, named like self_attn.q_proj+k_proj+v_proj.weight."""
    module, _, leaf = _words(tensors[0])
    layers = "+".join(layer for _, layer, _ in map(_words, tensors))
    return LinearWeight(
        ".".join(word for word in (module, layers, leaf) if word),
        [rows for tensor in tensors for rows in tensor.rows],
        [width for tensor in tensors for width in tensor.widths],
        in_features=tensors[0].shape.numpy()[0],
        dtype=tensors[0].dtype,
    )


def _biases(linears: list[_Linear]) -> np.ndarray:
    """Return all biases [out_features of all], zeros where a layer has none."""
    given = [linear.bias.const_value for linear in linears if linear.bias is not None]
    dtype = next(tensor.numpy().dtype for tensor in given if tensor is not None)
    return np.concatenate(
        [
            np.zeros(linear.width, dtype)
            if linear.bias is None or linear.bias.const_value is None
            else linear.bias.const_value.numpy()
            for linear in linears
        ]
    )
