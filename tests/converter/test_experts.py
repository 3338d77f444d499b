"""Mixtures of experts: our experts function against transformers' own, and the unrolled graph."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from transformers import MixtralConfig
from transformers.integrations.moe import use_experts_implementation

from kvconv import names
from kvconv.converter.experts import EXPERTS_NAME, unroll
from kvconv.converter.weights import lay_out, save
from tiny_decoders import tiny_model

EXPERTS, HIDDEN, INNER, TOP_K = 5, 6, 7, 2
_INPUTS = ["hidden_states", "top_k_index", "top_k_weights"]


class _Experts(torch.nn.Module):
    """Experts as a model may have them; the decorator adds what says how they are stored."""

    def __init__(self, config: MixtralConfig, *, gate: bool, transposed: bool, bias: bool) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.act_fn = torch.nn.GELU()
        self.post_expert_norm = torch.nn.LayerNorm(HIDDEN)
        first, inner = ("gate_up_proj", 2 * INNER) if gate else ("up_proj", INNER)
        for name, sizes in ((first, (inner, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            stack = torch.randn(EXPERTS, *(sizes[::-1] if transposed else sizes))
            self.register_parameter(name, torch.nn.Parameter(stack))
            if bias:
                values = torch.nn.Parameter(torch.randn(EXPERTS, sizes[0]))
                self.register_parameter(f"{name}_bias", values)

    def forward(self, hidden_states, top_k_index, top_k_weights):  # type: ignore[no-untyped-def]
        raise NotImplementedError  # every implementation used here is registered


def make_experts(*, gate: bool, transposed: bool, bias: bool, post_norm: bool) -> torch.nn.Module:
    decorated = use_experts_implementation(
        type("Experts", (_Experts,), {}), is_transposed=transposed, has_bias=bias, has_gate=gate,
        has_post_expert_norm=post_norm,
    )  # fmt: skip
    torch.manual_seed(3)
    module = decorated(MixtralConfig(), gate=gate, transposed=transposed, bias=bias)
    return module.eval().requires_grad_(False)


def routed(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, and routing to two experts of which none is the last expert."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.rand(num_tokens, EXPERTS - 1, generator=generator)
    weights, index = scores.topk(TOP_K)
    return hidden, index, weights


@pytest.mark.parametrize(
    "kind",
    [
        {"gate": True, "transposed": False, "bias": False, "post_norm": False},
        {"gate": True, "transposed": True, "bias": True, "post_norm": False},
        {"gate": False, "transposed": False, "bias": True, "post_norm": True},
    ],
    ids=lambda kind: "-".join(name for name, on in kind.items() if on),
)
def test_experts_agree_with_transformers_and_compute_nothing_for_idle_ones(kind, tmp_path):
    module = make_experts(**kind)
    module.config._experts_implementation = EXPERTS_NAME
    tokens = {0: torch.export.Dim("tokens")}
    program = torch.onnx.export(
        module, routed(3), dynamo=True, dynamic_shapes=(tokens, tokens, tokens), optimize=False,
        input_names=_INPUTS, output_names=["result"], verbose=False,
    )  # fmt: skip
    assert program is not None
    lay_out(program.model)
    session = ort.InferenceSession(save(program.model, tmp_path))
    module.config._experts_implementation = "batched_mm"
    for num_tokens in (1, 2, 9):
        inputs = routed(num_tokens)
        feeds = dict(zip(_INPUTS, (tensor.numpy() for tensor in inputs), strict=True))
        np.testing.assert_allclose(
            session.run(None, feeds)[0], module(*inputs).numpy(), rtol=1e-4, atol=1e-4
        )


def stacked(*, is_transposed: bool) -> tuple[ir.Model, np.ndarray]:
    """Return two ExpertsLinear nodes over one stack [num_experts, out, in], and the stack."""
    stack = np.random.default_rng(7).standard_normal((EXPERTS, INNER, HIDDEN)).astype(np.float32)
    stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if is_transposed else stack
    tape = ir.tape.Tape()
    rows, counts, weight = (
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        for name, shape, dtype in (
            ("rows", ["n", HIDDEN], ir.DataType.FLOAT),
            ("counts", [EXPERTS], ir.DataType.INT64),
            ("stack", list(stored.shape), ir.DataType.FLOAT),
        )
    )
    weight.const_value = ir.Tensor(stored, name="stack")
    outputs = []
    for name in ("first", "second"):
        output = tape.op(
            names.TRACE_EXPERTS, [rows, counts, weight], domain=names.TRACE_DOMAIN,
            attributes={"is_transposed": int(is_transposed)},
        )  # fmt: skip
        output.name, output.type = name, ir.TensorType(ir.DataType.FLOAT)
        output.shape = ir.Shape(["n", INNER])
        outputs.append(output)
    graph = ir.Graph(
        [rows, counts], outputs, nodes=tape.nodes, initializers=[weight], opset_imports={"": 18}
    )
    return ir.Model(graph, ir_version=10), stack


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("counts", [(1, 0, 2, 0, 1), (0, 0, 0, 0, 4)], ids=str)
def test_unroll_multiplies_each_run_of_rows_by_its_expert(is_transposed, counts, tmp_path):
    model, stack = stacked(is_transposed=is_transposed)
    unroll(model.graph)
    session = ort.InferenceSession(save(model, tmp_path))
    rows = np.random.default_rng(8).standard_normal((4, HIDDEN)).astype(np.float32)
    experts = np.repeat(np.arange(EXPERTS), counts)
    expected = np.einsum("nh,noh->no", rows, stack[experts])
    for result in session.run(None, {"rows": rows, "counts": np.array(counts)}):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_unroll_stores_each_expert_once_and_cuts_it_only_while_writing(tmp_path):
    model, _ = stacked(is_transposed=False)
    unroll(model.graph)
    weights = model.graph.initializers
    assert sorted(weights) == [f"stack.{expert}" for expert in range(EXPERTS)]
    assert all(list(weight.shape) == [HIDDEN, INNER] for weight in weights.values())
    nodes = [node.op_type for node in model.graph]
    assert nodes.count("MatMul") == 2 * EXPERTS
    assert nodes.count("Split") == nodes.count("Concat") == 2
    save(model, tmp_path)
    tensors = [weight.const_value for weight in weights.values()]
    assert all(isinstance(t, ir.LazyTensor) and t._tensor is None for t in tensors)
    unroll(model.graph)
    assert [node.op_type for node in model.graph] == nodes


@pytest.mark.kinds
def test_traced_mixtral_sorts_once_per_layer_and_stores_one_matrix_per_expert(traced):
    model, spec, path = traced("mixtral")
    graph = ir.load(path).graph
    experts = model.config.num_local_experts
    layers = len(spec.cache_shapes)
    stored = [name for name in graph.initializers if ".experts." in name]
    assert len(stored) == 2 * experts * layers
    assert all(len(graph.initializers[name].shape) == 2 for name in stored)
    nodes = [node.op_type for node in graph]
    assert nodes.count("TopK") == 2 * layers  # the router's choice, and the sort
    assert names.TRACE_EXPERTS not in nodes


@pytest.mark.kinds
def test_tracing_restores_the_experts_of_the_model(traced):
    model, _, _ = traced("mixtral")
    before = tiny_model("mixtral").config._experts_implementation
    assert model.config._experts_implementation == before != EXPERTS_NAME
