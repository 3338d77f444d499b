"""Traced graphs, run by the numpy evaluator, against PyTorch with eager attention."""

import inspect

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from kvconv import names
from kvconv.converter.decoder_spec import describe
from kvconv.converter.temperature import tuned_by_position
from kvconv.converter.trace import trace
from kvconv.errors import UnsupportedModelError
from rewrite_graphs import Attention
from tiny_decoders import (
    CONFIGS,
    LAYER_TYPES,
    LLAMA3_ROPE,
    LONGROPE,
    OWN_ATTENTION,
    WINDOW,
    padded_batch,
    tiny_model,
)

MODEL_TYPES = tuple(CONFIGS)
# CI traces one of each way to attend; the others' rewritten graphs are compared with PyTorch, too.
TRACED_IN_CI = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "bloom", "gptj", "phi3")


def most_are_slow(kinds):
    return [
        kind if kind in TRACED_IN_CI else pytest.param(kind, marks=pytest.mark.slow)
        for kind in kinds
    ]


def placeholders(path):
    nodes = [node for node in ir.load(path).graph if node.domain == names.TRACE_DOMAIN]
    return sorted(nodes, key=lambda node: node.attributes["layer_index"].as_int())


def run_in_chunks(spec, path, chunks):
    """Run a traced graph over a padded batch in several runs; returns all logits and caches."""
    input_ids, attention_mask, position_ids = (tensor.numpy() for tensor in padded_batch())
    session = ReferenceEvaluator(str(path), new_ops=[Attention])
    past = {}
    for layer, shape in enumerate(spec.cache_shapes):
        empty = (len(input_ids), shape.num_key_value_heads, 0)
        past[names.past_key(layer)] = np.zeros((*empty, shape.key_head_dim), np.float32)
        past[names.past_value(layer)] = np.zeros((*empty, shape.value_head_dim), np.float32)
    logits, start = [], 0
    for end in np.cumsum(chunks):
        feeds = {
            names.INPUT_IDS: input_ids[:, start:end],
            names.ATTENTION_MASK: attention_mask[:, :end],
            names.POSITION_IDS: position_ids[:, start:end],
            **past,
        }
        outputs = dict(zip(session.output_names, session.run(None, feeds), strict=True))
        logits.append(outputs.pop(names.LOGITS))
        past = {
            name.replace("present", "past_key_values"): value for name, value in outputs.items()
        }
        start = end
    return np.concatenate(logits, axis=1), past


def pytorch_logits(model):
    input_ids, attention_mask, position_ids = padded_batch()
    model.set_attn_implementation("eager")
    with tuned_by_position(model), torch.no_grad():
        output = model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        )
    return output.logits.numpy(), attention_mask.numpy().astype(bool)


@pytest.mark.kinds
@pytest.mark.parametrize("model_type", most_are_slow(MODEL_TYPES))
def test_trace_agrees_with_pytorch_in_one_run_and_in_chunks(traced, model_type):
    model, spec, path = traced(model_type)
    expected, attended = pytorch_logits(model)
    for chunks in ((13,), (1, 9, 2, 1)):
        logits, caches = run_in_chunks(spec, path, chunks)
        difference = np.abs(logits - expected)[attended].max()
        assert difference < 1e-4, f"{model_type} in chunks {chunks}: max abs {difference}"
        assert all(cache.shape[2] == 13 for cache in caches.values())


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gemma3_text", {"sliding_window": 99}),
        ("gemma3_text", {"query_pre_attn_scalar": 8}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("qwen3", {"rms_norm_eps": 1.0}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"sliding_window": 99}),
        ("gpt_oss", {"swiglu_limit": 0.5}),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("deepseek_v3", {"num_experts_per_tok": 1}),
        ("deepseek_v3", {"topk_group": 2}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ("mistral", {"sliding_window": 99}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3", {"rope_parameters": LLAMA3_ROPE}),
        ("gemma3_text", {"rope_parameters": {kind: LLAMA3_ROPE for kind in LAYER_TYPES}}),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": LONGROPE["long_factor"]}}),
        ("phi3", {"rope_parameters": LONGROPE | {"attention_factor": 1.0}}),
        ("gpt_neox", {"rotary_pct": 0.25}),
        ("cohere", {"logit_scale": 0.5}),
        ("smollm3", {"no_rope_layers": [1, 1]}),
        ("llama4_text", {"attention_chunk_size": 99}),
        ("llama4_text", {"use_qk_norm": True}),
        ("llama4_text", {"attn_temperature_tuning": False}),
        ("gpt_neo", {"window_size": 99}),
        ("falcon+alibi", {"alibi": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_tiny_decoders_feel_each_feature(model_type, change):
    plain, attended = pytorch_logits(tiny_model(model_type))
    changed, _ = pytorch_logits(tiny_model(model_type, **change))
    assert np.abs(plain - changed)[attended].max() > 0.02


def test_tiny_deepseek_feels_its_router_bias():
    model = tiny_model("deepseek_v3")
    plain, attended = pytorch_logits(model)
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    changed, _ = pytorch_logits(model)
    assert np.abs(plain - changed)[attended].max() > 0.02


@pytest.mark.kinds
def test_placeholders_say_what_the_attention_call_said(traced):
    sliding, full = placeholders(traced("gemma2")[2])
    assert sliding.attributes["window_size"].as_int() == WINDOW
    assert full.attributes["window_size"].as_int() == 0
    assert sliding.attributes["softcap"].as_float() == 2.0
    assert sliding.attributes["num_heads"].as_int() == 4
    assert sliding.attributes["kv_num_heads"].as_int() == 2
    assert sliding.attributes["is_causal"].as_int() == 1
    (first, _) = placeholders(traced("gemma3_text")[2])
    assert first.attributes["scale"].as_float() == pytest.approx(20**-0.5)


@pytest.mark.kinds
@pytest.mark.parametrize(
    "model_type", most_are_slow([kind for kind in MODEL_TYPES if kind not in OWN_ATTENTION])
)
def test_masks_are_materialised_and_present_is_the_concatenation(traced, model_type):
    nodes = placeholders(traced(model_type)[2])
    assert len(nodes) == 2
    for layer, node in enumerate(nodes):
        key, value, mask = node.inputs[1:4]
        assert mask is not None
        assert key.name == names.present_key(layer)
        assert value.name == names.present_value(layer)
        assert key.producer().op_type == "Concat"
        assert key.producer().inputs[0].name == names.past_key(layer)


@pytest.mark.kinds
@pytest.mark.parametrize(
    ("model_type", "heads", "positions"), [("llama", "2", [names.POSITION_IDS]), ("bloom", "4", [])]
)
def test_inputs_and_outputs_follow_the_graph_contract(traced, model_type, heads, positions):
    graph = ir.load(traced(model_type)[2]).graph
    shapes = {
        value.name: [str(dim) for dim in value.shape] for value in (*graph.inputs, *graph.outputs)
    }
    cache = [names.DIM_BATCH, heads, names.DIM_PAST, "8"]
    present = [names.DIM_BATCH, heads, names.DIM_TOTAL, "8"]
    assert shapes == {
        names.INPUT_IDS: [names.DIM_BATCH, names.DIM_SEQUENCE],
        names.ATTENTION_MASK: [names.DIM_BATCH, names.DIM_TOTAL],
        **{name: [names.DIM_BATCH, names.DIM_SEQUENCE] for name in positions},
        **{name(layer): cache for layer in (0, 1) for name in (names.past_key, names.past_value)},
        names.LOGITS: [names.DIM_BATCH, names.DIM_SEQUENCE, "259"],
        **{
            name(layer): present
            for layer in (0, 1)
            for name in (names.present_key, names.present_value)
        },
    }


def test_model_that_calls_the_interface_for_some_layers_only_is_refused(monkeypatch):
    model = tiny_model("llama")
    spec = describe(model)
    monkeypatch.setattr(
        model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(UnsupportedModelError, match="interface 1 times for 2 layers") as info:
        trace(model, spec, opset=23)
    assert info.value.model_type == "llama"


@pytest.mark.kinds
def test_model_with_attention_of_its_own_is_as_before_after_tracing(traced):
    model = traced("gpt_neo")[0]
    for layer in model.transformer.h:
        attention = layer.attn.attention
        assert attention.bias.dtype == torch.bool
        assert "bias" in attention._non_persistent_buffers_set
    assert "build_mpt_alibi_tensor" not in vars(traced("mpt")[0].transformer)
    assert inspect.isbuiltin(torch.nn.functional.scaled_dot_product_attention)


def test_unknown_attention_keyword_is_refused_by_name_and_the_model_restored(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    before = model.config._attn_implementation
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *args, **kwargs: forward(*args, position_bias=1, **kwargs)
    )
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        trace(model, describe(model), opset=23)
    assert model.config._attn_implementation == before


def _branch_on_data(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.sum() > 0 else x


def _branch_on_new_tokens(model):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) if x.shape[1] < 600 else x


def _branch_on_total_tokens(model):
    decoder = model.model
    forward = decoder.forward

    def branching(*args, attention_mask=None, **kwargs):
        output = forward(*args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.shape[1] > 600:
            output.last_hidden_state = -output.last_hidden_state
        return output

    decoder.forward = branching


@pytest.mark.parametrize(
    ("branch", "what"),
    [
        (_branch_on_data, "values that are known only when it runs"),
        (_branch_on_new_tokens, "sequence_length"),
        (_branch_on_total_tokens, r"total_sequence_length \(0 to 600\)"),
    ],
)
def test_model_that_branches_is_refused_with_what_it_branches_on(branch, what):
    model = tiny_model("llama", num_hidden_layers=1)
    branch(model)
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM branches on {what}"):
        trace(model, describe(model), opset=23)
