"""Which kernels a model's nodes ask for, from exports and from nodes made by hand."""

import onnx
import pytest
from onnx import TensorProto, helper

from kvconv import names
from kvconv.converter.kernel_builder import TritonKernels, find_attentions
from kvconv.custom_ops.triton.variants import DEFAULT_GPUS, Attention, Feature
from kvconv.errors import ExportError

FLOAT, FLOAT16, INT8, INT4 = 1, 10, 3, 2


def save_node(path, *, head_dim=64, value_head_dim=64, cache=FLOAT16, inputs=(), **attributes):
    """A model of one node with 6 query heads over 2; `inputs` are those beside the five first."""
    stored = {INT4: (head_dim // 32 * 20, value_head_dim // 32 * 16)}.get(
        cache, (head_dim, value_head_dim)
    )
    tensors = {
        "query": (FLOAT16, ["B", "S", 6 * head_dim]),
        "key": (FLOAT16, ["B", "S", 2 * head_dim]),
        "value": (FLOAT16, ["B", "S", 2 * value_head_dim]),
        "past_key": (cache, ["B", 2, "C", stored[0]]),
        "past_value": (cache, ["B", 2, "C", stored[1]]),
    } | dict.fromkeys(inputs, (FLOAT, ["any"]))
    given = [name if name in tensors else "" for name in names.FLASH_ATTENTION_INPUTS]
    node = helper.make_node(
        names.OP_NAME, given, ["output", "present_key", "present_value"],
        name="attention", domain=names.OP_DOMAIN, num_heads=6, kv_num_heads=2, **attributes,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, *tensor) for name, tensor in tensors.items()]
    outputs = [helper.make_tensor_value_info("output", FLOAT16, None)]
    graph = helper.make_graph([node], "one", values, outputs)
    onnx.save(helper.make_model(graph), path)
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (FLOAT16, FLOAT16, 64, 64, 3, 0, Feature.CAUSAL)),
        ({"causal": 0}, (FLOAT16, FLOAT16, 64, 64, 3, 0, Feature(0))),
        (
            {"inputs": ("cos", "sin", "attention_mask")},
            (FLOAT16, FLOAT16, 64, 64, 3, 64, Feature.ROTARY | Feature.MASK | Feature.CAUSAL),
        ),
        (
            {"inputs": ("cos", "sin"), "rotary_dim": 32, "rotary_interleaved": 1},
            (
                FLOAT16, FLOAT16, 64, 64, 3, 32,
                Feature.ROTARY | Feature.ROTARY_INTERLEAVED | Feature.CAUSAL,
            ),
        ),
        # Without cos the op rotates nothing, whatever the attribute says.
        ({"rotary_interleaved": 1}, (FLOAT16, FLOAT16, 64, 64, 3, 0, Feature.CAUSAL)),
        (
            {"window_size": 8, "cache_mode": "ring", "softcap": 2.0},
            (
                FLOAT16, FLOAT16, 64, 64, 3, 0,
                Feature.WINDOW | Feature.RING | Feature.SOFTCAP | Feature.CAUSAL,
            ),
        ),
        (
            {"inputs": ("attention_bias", "alibi_slopes", "head_sink"), "value_head_dim": 128},
            (
                FLOAT16, FLOAT16, 64, 128, 3, 0,
                Feature.BIAS | Feature.ALIBI | Feature.SINK | Feature.CAUSAL,
            ),
        ),
        ({"cache": INT8, "head_dim": 80}, (FLOAT16, INT8, 80, 64, 3, 0, Feature.CAUSAL)),
        ({"cache": INT4, "head_dim": 192}, (FLOAT16, INT4, 192, 64, 3, 0, Feature.CAUSAL)),
        ({"cache": TensorProto.BFLOAT16}, (FLOAT16, 16, 64, 64, 3, 0, Feature.CAUSAL)),
    ],
)  # fmt: skip
def test_node_asks_for_exactly_what_it_has(tmp_path, given, expected):
    (found,) = find_attentions(save_node(tmp_path / "model.onnx", **given))
    assert found == Attention(*expected)


def test_node_without_kernels_is_refused_by_name_before_anything_is_compiled(tmp_path):
    path = save_node(tmp_path / "model.onnx", head_dim=112)
    with pytest.raises(ExportError, match="attention has head_dim 112; .*Export for the CPU"):
        TritonKernels(("sm_80",)).build(path)


def test_model_without_attention_nodes_is_refused(tmp_path):
    path = save_node(tmp_path / "model.onnx")
    model = onnx.load(path)
    model.graph.node[0].op_type = "Other"
    onnx.save(model, path)
    with pytest.raises(ExportError, match=r"model.onnx has no FlashAttention nodes"):
        find_attentions(path)


def test_no_gpus_are_all_of_them_and_unknown_ones_are_refused():
    assert TritonKernels().gpus == DEFAULT_GPUS
    with pytest.raises(ExportError, match="'sm_70' is no GPU"):
        TritonKernels(("sm_70",))
