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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx_ir.passes import common

from kvconv import names
from kvconv.converter.bias import bias_behind, only_reader
from kvconv.converter.blocks import ZeroPoints
from kvconv.converter.float_weight import FloatWeight
from kvconv.converter.linear_weight import LinearWeight, Rows
from kvconv.converter.nbits import Form, NBitsWeight, gather, matmul
from kvconv.converter.options import ExportOptions, WeightsReport
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
class _Left:
    """Why a weight stays float.

    Attributes:
        reason: What is printed.
        is_known: Whether kvconv means it to stay float; otherwise it may not be much.
    """

    reason: str
    is_known: bool = True


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
        if isinstance(found, _Left):
            (left if found.is_known else unexplained)[found.reason] += tensor.nbytes
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
    if options.has_own_weights:
        model.opset_imports.setdefault(names.OP_DOMAIN, names.FLOAT_CACHES_OP_VERSION)
    else:
        model.opset_imports.setdefault(names.ORT_DOMAIN, 1)
    stored = Counter[str]()
    for nbits in weights:
        stored[str(nbits.form)] += nbits.nbytes
    return WeightsReport(quantized, dict(stored), dict(left + unexplained)), weights


def _readers(weight: ir.Value) -> tuple[list[_Linear], list[ir.Node]] | _Left:
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
            if gathers and tensor.nbytes > INLINE_BYTES:
                return _Left("a table whose rows are not chosen by token ids alone")
            return [], []  # a bias or such, no linear weight
    if tensor.nbytes <= INLINE_BYTES:
        return _Left(f"smaller than {INLINE_BYTES} bytes")
    if others == {"MatMul"} and len(tensor.shape) > 2:
        what = "head" if _is_per_head(weight) else "expert, all of which are computed"
        return _Left(f"a stack of matrices, one for each {what}")
    if others:
        return _Left(f"read by {', '.join(sorted(others))}", is_known=False)
    if len({linear.is_transposed for linear in linears} | ({False} if gathers else set())) > 1:
        return _Left("read by rows and by columns", is_known=False)
    if any(_feeds(linear.output, _is_top_k, _DEPTH) for linear in linears):
        return _Left("a router, which chooses experts")
    return linears, gathers


def _is_per_head(weight: ir.Value) -> bool:
    """Tell [batch, heads, tokens, K] times a stack from [experts, tokens, K] times one."""
    multiplied = [node.inputs[0] for node in weight.consumers()]
    return all(x is not None and x.shape is not None and len(x.shape) == 4 for x in multiplied)


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
    before, after = linear.x.producer(), only_reader(linear.output)
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
    return replace(linear, x=x, output=output, replaced=(linear.node, after))


def _with_bias(linear: _Linear) -> _Linear:
    """Take in an Add of a vector behind the product."""
    weight = linear.node.inputs[1]
    assert weight is not None
    width = _sizes(weight)[1 if linear.is_transposed else 0]
    found = None if linear.bias is not None else bias_behind(linear.output, width)
    if found is None:
        return linear
    add, bias = found
    return replace(linear, output=add.outputs[0], bias=bias, replaced=(*linear.replaced, add))


def _is_vector(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) == 1


def _gathers_tokens(node: ir.Node) -> bool:
    """Tell whether the indices of a Gather are the token ids, be they of another shape or type."""
    indices = node.inputs[1]
    while indices is not None and (before := indices.producer()) is not None:
        if before.op_type not in ("Reshape", "Cast"):
            return False
        indices = before.inputs[0]
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

    rows: Sequence[Rows] = (lambda: tensor.numpy().T if is_transposed else tensor.numpy(),)
    source = FloatWeight(
        weight.name,
        tensor.rows if isinstance(tensor, LinearWeight) else rows,
        out_features=out_features,
        in_features=in_features,
        dtype=tensor.dtype,
    )
    own_ops = options.has_own_weights

    def made(bits: int, block_size: int) -> NBitsWeight:
        symmetric = bits == 8 or options.symmetric
        zero_points: ZeroPoints = "none" if symmetric else "float" if own_ops else "integer"
        return NBitsWeight(source, Form(bits, block_size, zero_points), own_ops=own_ops)

    block_size = options.chosen_block_size
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
