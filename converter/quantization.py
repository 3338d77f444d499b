"""Gives linear weights 8 or 4 bits: MatMul and Gemm become MatMulNBits, on the graph as laid out.

A weight is quantised when it is written, so memory never holds more than one of them twice. All
readers of a weight must be known, or it stays as it is:

1. MatMul(x, weight [K, N]) and Gemm, with or without a bias -> MatMulNBits, bias included. Reshapes
   around a Gemm go.
2. Gather of a token embedding -> GatherBlockQuantized. A tied embedding is one initializer, which
   both read.

Of an int4 bundle, sensitive weights that lose more than 1% have 8 bits: those in front of
attention, whose keys and values all later tokens read, and the LM head. Other weights that lose so
much have blocks of 16. A checkpoint that was made of such blocks (GGUF) loses nothing.

The router of a mixture of experts stays float: it is small, and a rounding there sends a token to
another expert. Biases, norms and tables are no linear weights.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from kvconv import names
from kvconv.converter.linear_weight import LinearWeight
from kvconv.converter.nbits import Form, NBitsWeight, gather, matmul
from kvconv.converter.options import DEFAULT_BLOCK_SIZE, ExportOptions, WeightsReport
from kvconv.converter.weights import INLINE_BYTES
from kvconv.errors import ExportError

MAX_UNEXPLAINED = 0.05
"""Part of the linear weights' bytes that may stay float for a reason that nobody foresaw."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_DEPTH = 16
_MAX_LOSS = 0.01
"""Error of a weight, in parts of its size, above which it gets more bytes."""
_FINE_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Linear:
    """A node that multiplies by a weight.

    Attributes:
        node: The MatMul or Gemm.
        x: [.., K], what is multiplied.
        output: [.., N], the product with its bias.
        bias: [N], or None.
        is_transposed: Whether the weight is [K, N].
        replaced: Every node that goes, the node itself included.
    """

    node: ir.Node
    x: ir.Value
    output: ir.Value
    bias: ir.Value | None
    is_transposed: bool
    replaced: tuple[ir.Node, ...]


def quantize(model: ir.Model, options: ExportOptions) -> tuple[WeightsReport, list[NBitsWeight]]:
    """Quantise every linear weight; changes the model in place.

    Args:
        model: Laid out and simplified; its weights are written later.
        options: Say how, and by their flavour with which operators: kvconv's own, or ONNX
            Runtime's.

    Returns:
        What was done, and the weights.

    Raises:
        ExportError: More than 5% of the linear weights would stay float for no known reason, or a
            weight is not finite.
    """
    graph = model.graph
    left, unexplained = Counter[str](), Counter[str]()
    quantized, weights = 0, list[NBitsWeight]()
    for weight in list(graph.initializers.values()):
        tensor = weight.const_value
        if tensor is None or tensor.dtype not in _FLOATS or len(tensor.shape) < 2:
            continue
        found = _readers(weight)
        if isinstance(found, str):
            (unexplained if found.startswith("read by") else left)[found] += tensor.nbytes
            continue
        linears, gathers = found
        if not linears and not gathers:
            continue
        nbits = _nbits_weight(weight, linears, options, _is_sensitive(graph, linears))
        for linear in linears:
            _replace(graph, linear, nbits, options.chosen_accuracy_level)
        for node in gathers:
            _replace_gather(graph, node, nbits)
        nbits.register(graph)
        quantized += tensor.nbytes
        weights.append(nbits)
    total = quantized + left.total() + unexplained.total()
    if unexplained.total() > MAX_UNEXPLAINED * total:
        reasons = ", ".join(f"{nbytes / 1e6:.1f} MB {why}" for why, nbytes in unexplained.items())
        raise ExportError(
            f"{unexplained.total() / total:.0%} of the linear weights would stay float, as kvconv "
            f"does not know how to quantise what is {reasons}. Please report this model; it "
            f"exports without --weights."
        )
    common.RemoveUnusedNodesPass()(model)
    if options.attention == "flash":
        model.opset_imports.setdefault(names.OP_DOMAIN, names.OP_VERSION)
    else:
        model.opset_imports.setdefault(names.ORT_DOMAIN, 1)
    stored = Counter[str]()
    for nbits in weights:
        stored[str(nbits.form)] += nbits.nbytes
    return WeightsReport(quantized, dict(stored), dict(left + unexplained)), weights


def _readers(weight: ir.Value) -> tuple[list[_Linear], list[ir.Node]] | str:
    """Return who multiplies by a weight and who gathers its rows, or why it stays float."""
    tensor = weight.const_value
    assert tensor is not None
    linears: list[_Linear] = []
    gathers: list[ir.Node] = []
    others: set[str] = set()
    for node, index in weight.uses():
        if index == 0 and node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            gathers.append(node)
        elif (linear := _linear(node, index)) is not None:
            linears.append(linear)
        else:
            others.add(node.op_type)
    if not linears and all(op in ("Add", "Mul", "Gather", "Slice", "Concat") for op in others):
        if not gathers or others or not all(_gathers_tokens(node) for node in gathers):
            return [], []  # a table, no linear weight
    if tensor.nbytes <= INLINE_BYTES:
        return f"smaller than {INLINE_BYTES} bytes"
    if others == {"MatMul"} and len(tensor.shape) > 2:
        return "a stack of matrices, one for each head"
    if others:
        return f"read by {', '.join(sorted(others))}"
    if len({linear.is_transposed for linear in linears} | ({False} if gathers else set())) > 1:
        return "read by rows and by columns"
    if any(_feeds(linear.output, _is_top_k, _DEPTH) for linear in linears):
        return "a router, which chooses experts"
    return linears, gathers


def _linear(node: ir.Node, index: int) -> _Linear | None:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    x = node.inputs[0]
    if index != 1 or weight is None or x is None or len(_sizes(weight)) != 2:
        return None
    if node.op_type == "MatMul":
        return _with_bias(_Linear(node, x, node.outputs[0], None, True, (node,)))
    if node.op_type != "Gemm" or node.attributes.get_int("transA", 0) != 0:
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    if factors != [1.0, 1.0] or (bias is not None and not _is_vector(bias)):
        return None
    is_transposed = node.attributes.get_int("transB", 0) == 0
    linear = _Linear(node, x, node.outputs[0], bias, is_transposed, (node,))
    return _with_bias(_without_reshapes(linear))


def _without_reshapes(linear: _Linear) -> _Linear:
    """Drop [.., K] -> [rows, K] -> Gemm -> [rows, N] -> [.., N], which only a Gemm needs."""
    before, after = linear.x.producer(), _only_reader(linear.output)
    if before is None or before.op_type != "Reshape" or after is None or after.op_type != "Reshape":
        return linear
    x, output = before.inputs[0], after.outputs[0]
    if x is None or x.shape is None or output.shape is None or len(x.shape) != len(output.shape):
        return linear
    weight = linear.node.inputs[1]
    assert weight is not None
    in_features, out_features = _sizes(weight)[:: 1 if linear.is_transposed else -1]
    if list(x.shape)[-1] != in_features or list(output.shape)[-1] != out_features:
        return linear
    if list(x.shape)[:-1] != list(output.shape)[:-1]:
        return linear
    return _Linear(linear.node, x, output, linear.bias, linear.is_transposed, (linear.node, after))


def _with_bias(linear: _Linear) -> _Linear:
    """Take in an Add of a vector behind the product."""
    after = _only_reader(linear.output)
    if linear.bias is not None or after is None or after.op_type != "Add":
        return linear
    bias = next((value for value in after.inputs if value is not linear.output), None)
    weight = linear.node.inputs[1]
    assert weight is not None
    width = _sizes(weight)[1 if linear.is_transposed else 0]
    if bias is None or not _is_vector(bias) or _sizes(bias) != [width]:
        return linear
    return _Linear(
        linear.node,
        linear.x,
        after.outputs[0],
        bias,
        linear.is_transposed,
        (*linear.replaced, after),
    )


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0][0] if len(uses) == 1 and not value.is_graph_output() else None


def _is_vector(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 1


def _gathers_tokens(node: ir.Node) -> bool:
    indices = node.inputs[1]
    return indices is not None and indices.name == names.INPUT_IDS


def _feeds(value: ir.Value, wanted: Callable[[ir.Node], bool], depth: int) -> bool:
    """Tell whether few steps lead from a value to such a node, no further product in between."""
    return depth > 0 and any(
        wanted(node)
        or (
            node.op_type not in ("MatMul", "Gemm", names.MATMUL_NBITS)
            and any(_feeds(output, wanted, depth - 1) for output in node.outputs)
        )
        for node, _ in value.uses()
    )


def _is_top_k(node: ir.Node) -> bool:
    return node.op_type == "TopK"


def _is_attention(node: ir.Node) -> bool:
    """Tell whether a node is attention: the placeholder, or a product of two computed values."""
    if node.domain == names.TRACE_DOMAIN:
        return node.op_type == names.TRACE_ATTENTION
    return node.op_type == "MatMul" and all(
        value is not None and value.const_value is None for value in node.inputs
    )


def _is_sensitive(graph: ir.Graph, linears: list[_Linear]) -> bool:
    return _is_head(graph, linears) or any(
        _feeds(linear.output, _is_attention, _DEPTH) for linear in linears
    )


def _is_head(graph: ir.Graph, linears: list[_Linear]) -> bool:
    logits = next((value for value in graph.outputs if value.name == names.LOGITS), None)
    if logits is None or logits.shape is None:
        return False
    weights = (linear.node.inputs[1] for linear in linears)
    width = list(logits.shape)[-1]
    return any(weight is not None and width in _sizes(weight) for weight in weights)


def _nbits_weight(
    weight: ir.Value, linears: list[_Linear], options: ExportOptions, is_sensitive: bool
) -> NBitsWeight:
    """Choose the form of a weight; see the module."""
    tensor = weight.const_value
    assert tensor is not None
    assert weight.name is not None
    is_transposed = bool(linears) and linears[0].is_transposed
    out_features, in_features = _sizes(weight)[:: -1 if is_transposed else 1]

    if isinstance(tensor, LinearWeight):
        rows = tensor.rows
    else:
        rows = (lambda: tensor.numpy().T if is_transposed else tensor.numpy(),)
    own_ops = options.attention == "flash"

    def made(bits: int, block_size: int) -> NBitsWeight:
        symmetric = bits == 8 or options.symmetric
        return NBitsWeight(
            name=str(weight.name),
            rows=rows,
            out_features=out_features,
            in_features=in_features,
            dtype=tensor.dtype,
            form=Form(bits, block_size, "none" if symmetric else "float" if own_ops else "integer"),
            own_ops=own_ops,
        )

    block_size = options.block_size or DEFAULT_BLOCK_SIZE[options.weights or "int4"]
    if options.weights == "int8":
        return made(8, block_size)
    chosen = made(4, block_size)
    if options.pure or chosen.loss() <= _MAX_LOSS:
        return chosen
    if is_sensitive:
        return made(8, block_size)
    return made(4, options.block_size or _FINE_BLOCK_SIZE)


def _replace(graph: ir.Graph, linear: _Linear, weight: NBitsWeight, accuracy_level: int) -> None:
    tape = ir.tape.Tape()
    product = matmul(tape, linear.x, weight, linear.bias, accuracy_level)
    ir.convenience.replace_nodes_and_values(
        graph, linear.node, list(linear.replaced), tape.nodes, [linear.output], [product]
    )


def _replace_gather(graph: ir.Graph, node: ir.Node, weight: NBitsWeight) -> None:
    tape = ir.tape.Tape()
    indices = node.inputs[1]
    assert indices is not None
    rows = gather(tape, indices, weight)
    for initializer in tape.initializers:
        graph.register_initializer(initializer)
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [rows])


def _sizes(value: ir.Value) -> list[int]:
    assert value.const_value is not None
    return [int(size) for size in value.const_value.shape.numpy()]
