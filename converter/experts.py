"""Mixtures of experts: our experts function, as transformers calls it while a decoder is traced.

Importing this module registers the function under our name. It sorts the routed tokens by expert,
so that each expert reads one run of rows, and leaves placeholders `kvconv.trace::ExpertsLinear` in
the trace: linear layers whose weight is a stack of matrices, one per expert. `unroll` replaces each
by Split (of the rows), one MatMul per expert, and Concat; an expert to which no token was routed
multiplies no rows. The router and the activation are traced as the model has them.
"""

from typing import Any

import numpy.typing as npt
import onnx_ir as ir
import torch
from transformers.integrations.moe import ExpertsInterface

from kvconv import names
from kvconv.converter.linear_weight import LinearWeight, Rows

EXPERTS_NAME = "kvconv"
"""Name under which transformers knows our experts function."""


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Stand for one call of transformers' experts interface.

    Letters: n tokens (batch_size * sequence_length), k experts per token.

    Args:
        module: The experts; transformers' decorator has told it how its weights are stored.
        hidden_states: [n, hidden_size].
        top_k_index: [n, k] int64, the experts of each token.
        top_k_weights: [n, k], their weights.

    Returns:
        [n, hidden_size], each token's weighted sum over its experts.
    """
    num_tokens, top_k = top_k_index.shape
    # 1. The n * k pairs of a token and an expert, in the order of the experts.
    experts, order = top_k_index.reshape(-1).sort()
    counts = (experts.unsqueeze(-1) == torch.arange(module.num_experts)).sum(0)
    tokens = torch.onnx.ops.symbolic(
        "Div", (order, torch.tensor(top_k)), dtype=order.dtype, shape=order.shape
    )
    rows = _gather(hidden_states, tokens)

    # 2. What each expert makes of its rows.
    if module.has_gate:
        rows = module._apply_gate(_linear(module, "gate_up_proj", rows, experts, counts))
    else:
        rows = module.act_fn(_linear(module, "up_proj", rows, experts, counts))
    rows = _linear(module, "down_proj", rows, experts, counts)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)

    # 3. Weighted, back in the order of the tokens, and summed.
    rows = rows * _gather(top_k_weights.reshape(-1, 1), order)
    back = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0]))
    return _gather(rows, back).reshape(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def _linear(
    module: Any, name: str, rows: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply sorted rows by the matrices of their experts.

    Args:
        module: Has the parameter `name`, [num_experts, out, in] ([num_experts, in, out] if it
            `is_transposed`), and `name`_bias, [num_experts, out], if it `has_bias`.
        name: See module.
        rows: [n * k, in], sorted by expert.
        experts: [n * k] int64, the expert of each row.
        counts: [num_experts] int64, rows per expert.

    Returns:
        [n * k, out].
    """
    weight: torch.Tensor = getattr(module, name)
    out_features = weight.shape[2 if module.is_transposed else 1]
    product = torch.onnx.ops.symbolic(
        f"{names.TRACE_DOMAIN}::{names.TRACE_EXPERTS}",
        (rows.to(weight.dtype), counts, weight),
        {"is_transposed": int(module.is_transposed)},
        dtype=weight.dtype,
        shape=(rows.shape[0], out_features),
        version=1,
    )
    if module.has_bias:
        product = product + _gather(getattr(module, f"{name}_bias"), experts)
    return product


def _gather(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows[index] as one node; indexing is exported with guards against what cannot be.

    Args:
        rows: [rows, width].
        index: [n] int64, none of them negative.
    """
    return torch.onnx.ops.symbolic(
        "Gather",
        (rows, index),
        {"axis": 0},
        dtype=rows.dtype,
        shape=(index.shape[0], rows.shape[1]),
    )


ExpertsInterface.register(EXPERTS_NAME, _experts)


def unroll(graph: ir.Graph) -> None:
    """Replace each ExpertsLinear by one MatMul per expert; changes the graph in place.

    Each expert's matrix becomes a weight of its own, [in, out], cut from the stack while it is
    written: a stack is never copied as a whole, and no step slices it.
    """
    matrices: dict[str, list[ir.Value]] = {}
    for node in list(graph):
        if node.domain == names.TRACE_DOMAIN and node.op_type == names.TRACE_EXPERTS:
            _unroll(graph, node, matrices)


def _unroll(graph: ir.Graph, node: ir.Node, matrices: dict[str, list[ir.Value]]) -> None:
    rows, counts, stack = node.inputs
    assert stack is not None
    assert stack.name is not None
    if stack.name not in matrices:
        matrices[stack.name] = _matrices(stack, node.attributes.get_int("is_transposed", 0) == 1)
        graph.initializers.pop(stack.name)
        for matrix in matrices[stack.name]:
            graph.register_initializer(matrix)
    weights = matrices[stack.name]
    tape = ir.tape.Tape()
    parts = tape.op_multi_out(
        "Split", [rows, counts], attributes={"axis": 0}, num_outputs=len(weights)
    )
    products = [
        tape.op("MatMul", [part, weight]) for part, weight in zip(parts, weights, strict=True)
    ]
    result = tape.op("Concat", products, attributes={"axis": 0})
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])


def _matrices(stack: ir.Value, is_transposed: bool) -> list[ir.Value]:
    """Return one weight [in, out] per expert, which is read off the stack when it is written."""
    tensor = stack.const_value
    assert tensor is not None
    num_experts, *sizes = tensor.shape.numpy()
    in_features, out_features = sizes if is_transposed else reversed(sizes)
    values = []
    for expert in range(num_experts):
        name = f"{stack.name}.{expert}"
        lazy = LinearWeight(
            name,
            [_matrix(tensor, expert, is_transposed)],
            [out_features],
            in_features=in_features,
            dtype=tensor.dtype,
        )
        values.append(
            ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=lazy.shape, const_value=lazy
            )
        )
    return values


def _matrix(tensor: ir.TensorProtocol, expert: int, is_transposed: bool) -> Rows:
    def rows() -> npt.NDArray[Any]:
        matrix = tensor.numpy()[expert]
        return matrix.T if is_transposed else matrix

    return rows
