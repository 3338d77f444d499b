"""Traced models, rewritten, against PyTorch: prefill in pieces, padding, holes, both cache modes.

Tiny models whose weights make a lost window, softcap or rotation show: the logits are compared to
1e-5 of their size, and each feature moves them by more than a hundredth.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
import torch

from kvconv import names
from kvconv.converter.decoder_spec import DecoderSpec
from kvconv.converter.rewrite import RewriteReport, read_graph, rewrite
from kvconv.converter.rewrite.graph import find, set_operand, upstream
from kvconv.converter.temperature import tuned_by_position
from kvconv.errors import RewriteError
from rewrite_graphs import open_session, run
from tiny_decoders import CONFIGS, OWN_ATTENTION, WINDOW

pytestmark = pytest.mark.kinds
_COS = names.FLASH_ATTENTION_INPUTS.index("cos")
BATCH, TOKENS, CAPACITY = 3, 14, 17
WINDOWS = {
    "gemma3_text": (WINDOW, None),
    "gemma2": (WINDOW, None),
    "mistral": (WINDOW, WINDOW),
    "qwen2": (None, WINDOW),
    "gpt_oss": (WINDOW, None),
    "gpt_neo": (None, WINDOW),
}
"""Model type -> windows that rewriting must find; no windows in the others."""
UNROTATED = ("gpt2", "bloom", "falcon+alibi", "gpt_neo", "mpt", "deepseek_v3")
ROTATED_IN_THE_OP = dict.fromkeys(UNROTATED, 0) | {"smollm3": 1, "llama4_text": 1}
"""Model type -> layers; all in the others. What DeepSeek V3 caches is rotated already."""
BIASES = {"llama4_text": (1, "new token 3 sees slot 0"), "falcon+alibi": (2, "it adds numbers")}
"""Model type -> layers whose mask stays a bias, and why.

Chunks are no attribute of the op; Falcon's ALiBi is bfloat16, so no multiple of the slot.
"""
HOLES = {"bloom": "holes in attention_mask are left alone"}
"""Model type -> what a hole is told; the last row of `prompt` has one."""
NO_GQA = {"qwen3": "multiples of 8", "mpt": "multiples of 8", "deepseek_v3": "takes one width"}
"""Model type -> what GroupQueryAttention does not take."""
# The last first: the process that has test_trace.py begins at the other end, and they share traces.
KINDS = tuple(reversed(CONFIGS))


@dataclass(frozen=True)
class Decoder:
    """A traced model on disk, and PyTorch's logits [BATCH, TOKENS, vocab_size]."""

    model_type: str
    path: Path
    spec: DecoderSpec
    logits: npt.NDArray[np.float32]


def prompt() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return input_ids, attention_mask (full, left padding, hole) and position_ids."""
    ids = np.random.default_rng(0).integers(0, 256, (BATCH, TOKENS))
    mask = np.ones((BATCH, TOKENS), np.int64)
    mask[1, :3] = 0
    mask[2, 4:6] = 0
    return ids, mask, np.clip(np.cumsum(mask, 1) - 1, 0, None)


@pytest.fixture
def decoder(request: pytest.FixtureRequest, traced: Callable[[str], Any]) -> Decoder:
    """Return the model named by the test's parameter."""
    model, spec, path = traced(request.param)
    ids, mask, positions = (torch.tensor(array) for array in prompt())
    model.set_attn_implementation("eager")
    with tuned_by_position(model), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    return Decoder(request.param, path, spec, logits.numpy())


def rewritten(decoder: Decoder, attention: str) -> tuple[ort.InferenceSession, RewriteReport]:
    """Rewrite a traced model and open it."""
    graph = read_graph(decoder.path)
    report = rewrite(graph, attention=attention, opset=23)
    return open_beside_weights(graph, decoder, attention), report


def open_beside_weights(graph: gs.Graph, decoder: Decoder, name: str) -> ort.InferenceSession:
    """Write a graph into a folder of its own that holds the weights too, and open it."""
    folder = decoder.path.parent / name
    if not folder.exists():
        folder.mkdir()
        shutil.copyfile(decoder.path.with_name(names.WEIGHTS_FILE), folder / names.WEIGHTS_FILE)
    return open_session(graph, folder)


def decode(
    session: ort.InferenceSession, spec: DecoderSpec, capacity: int, rows: int = BATCH
) -> npt.NDArray:
    """Feed the prompt in pieces of 6, 1, 1 and 6 tokens; returns all logits.

    Args:
        session: A rewritten graph.
        spec: What it was traced from.
        capacity: Slots of a shared buffer, NaN at first; 0 for concat.
        rows: Sequences to feed; the first one has no padding.
    """
    ids, mask, positions = (array[:rows] for array in prompt())
    past = {}
    for layer, shape in enumerate(spec.cache_shapes):
        sides = (
            (names.past_key(layer), shape.key_head_dim),
            (
                names.past_value(layer),
                shape.value_head_dim,
            ),
        )
        for name, width in sides:
            size = (rows, shape.num_key_value_heads, capacity, width)
            past[name] = np.full(size, np.nan, np.float32)
    pieces, start = [], 0
    for tokens in (6, 1, 1, 6):
        new = slice(start, start + tokens)
        feeds = {
            names.INPUT_IDS: ids[:, new],
            names.ATTENTION_MASK: mask[:, : new.stop],
            names.POSITION_IDS: positions[:, new],
        }
        result = run(session, feeds | past)
        pieces.append(result.pop(names.LOGITS))
        past = {name.replace("present", "past_key_values"): v for name, v in result.items()}
        start += tokens
    return np.concatenate(pieces, 1)


def assert_equals_pytorch(actual: npt.NDArray, decoder: Decoder, *, holes: bool = True) -> None:
    real = prompt()[1][: len(actual)] != 0
    if not holes:
        real[2, 4:] = False
    assert np.isfinite(actual).all()
    largest = np.abs(decoder.logits).max()
    difference = np.abs(actual - decoder.logits[: len(actual)])[real].max()
    assert difference <= 1e-5 * largest, f"logits of up to {largest} differ by {difference}"


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_flash_equals_pytorch(decoder: Decoder) -> None:
    session, report = rewritten(decoder, "flash")
    assert report.windows == WINDOWS.get(decoder.model_type, (None, None))
    kind = decoder.model_type
    num_biases, reason = BIASES.get(kind, (0, HOLES.get(kind)))
    assert report.counts["eager"] == (2 if kind in OWN_ATTENTION else 0)
    assert report.counts["flash"] == 2
    assert report.counts["mask"] == 2 - num_biases
    assert report.counts["rotary"] == ROTATED_IN_THE_OP.get(kind, 2)
    assert bool(report.refusals) == (reason is not None)
    assert all(reason in refusal.reason for refusal in report.refusals)
    for capacity in (0, CAPACITY):
        logits = decode(session, decoder.spec, capacity)
        assert_equals_pytorch(logits, decoder, holes=kind not in HOLES)


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_standard_equals_pytorch(decoder: Decoder) -> None:
    session, report = rewritten(decoder, "standard")
    assert report.windows == WINDOWS.get(decoder.model_type, (None, None))
    assert report.refusals == ()
    assert_equals_pytorch(decode(session, decoder.spec, 0), decoder)


@pytest.mark.parametrize("decoder", [kind for kind in KINDS if kind not in NO_GQA], indirect=True)
def test_gqa_equals_pytorch_without_padding(decoder: Decoder) -> None:
    session, report = rewritten(decoder, "gqa")
    assert report.windows == WINDOWS.get(decoder.model_type, (None, None))
    assert report.counts["gqa"] == 2
    for capacity in (0, CAPACITY):
        assert_equals_pytorch(decode(session, decoder.spec, capacity, rows=1), decoder)


@pytest.mark.parametrize("decoder", NO_GQA, indirect=True)
def test_gqa_refuses_what_its_node_does_not_take(decoder: Decoder) -> None:
    with pytest.raises(RewriteError, match=NO_GQA[decoder.model_type]):
        rewritten(decoder, "gqa")


_MLP = ["MatMul", names.GATED_ACTIVATION, "MatMul"]
_RMS_LAYER = ["MatMul", names.SKIP_RMS_NORMALIZATION, *_MLP, names.SKIP_RMS_NORMALIZATION, "MatMul"]
LAYERS = {
    "llama": [*_RMS_LAYER, names.OP_NAME],
    "phi3": [*_RMS_LAYER, names.OP_NAME],
    "qwen3": [*_RMS_LAYER, names.HEAD_RMS_NORMALIZATION, names.OP_NAME],
    "gemma3_text": [*_RMS_LAYER, names.HEAD_RMS_NORMALIZATION, names.OP_NAME],
    "falcon": [
        "MatMul", "Add", names.SKIP_LAYER_NORMALIZATION, "MatMul", names.OP_NAME,
    ],
    "gpt_neox": [
        "MatMul", "Add", "Add", names.SKIP_LAYER_NORMALIZATION, "LayerNormalization", "MatMul",
        "Add", names.OP_NAME,
    ],
}  # fmt: skip
"""Model type -> what lies between the output of one attention and that of the next."""


@pytest.mark.parametrize("decoder", LAYERS, indirect=True)
def test_flash_layer_has_no_node_too_many(decoder: Decoder) -> None:
    graph = read_graph(decoder.path)
    rewrite(graph, attention="flash", opset=23)
    first, second = find(graph, names.OP_NAME, names.OP_DOMAIN)
    reached = {first.outputs[0].name}
    layer = []
    for node in upstream([second.outputs[0]]):
        if reached & {tensor.name for tensor in node.inputs}:
            reached |= {tensor.name for tensor in node.outputs}
            layer.append(node.op)
    assert layer == LAYERS[decoder.model_type]


def _drop_window(node: gs.Node) -> None:
    node.attrs["window_size"] = 0


def _drop_softcap(node: gs.Node) -> None:
    node.attrs["softcap"] = 0.0


def _drop_slopes(node: gs.Node) -> None:
    set_operand(node, "alibi_slopes", None)


def _drop_rotary(node: gs.Node) -> None:
    node.attrs["rotary_dim"] = 0
    while len(node.inputs) > _COS:
        node.inputs.pop()


def _drop_sink(node: gs.Node) -> None:
    set_operand(node, "head_sink", None)


@pytest.mark.parametrize(
    ("decoder", "drop"),
    [
        ("llama", _drop_rotary),
        ("gpt_neox", _drop_rotary),
        ("cohere", _drop_rotary),
        ("gemma3_text", _drop_rotary),
        ("smollm3", _drop_rotary),
        ("llama4_text", _drop_rotary),
        ("phi3", _drop_rotary),
        ("gemma3_text", _drop_window),
        ("gemma2", _drop_window),
        ("mistral", _drop_window),
        ("qwen2", _drop_window),
        ("gemma2", _drop_softcap),
        ("gpt_oss", _drop_rotary),
        ("gpt_oss", _drop_sink),
        ("gpt_oss", _drop_window),
        ("gpt_neo", _drop_window),
        ("bloom", _drop_slopes),
        ("mpt", _drop_slopes),
        ("gptj", _drop_rotary),
    ],
    indirect=["decoder"],
)
def test_flash_without_a_feature_differs(drop: Callable[[gs.Node], None], decoder: Decoder) -> None:
    """Equality above says something only where the feature moves the logits."""
    graph = read_graph(decoder.path)
    rewrite(graph, attention="flash", opset=23)
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        drop(node)
    logits = decode(open_beside_weights(graph, decoder, "altered"), decoder.spec, 0)
    difference = np.abs(logits - decoder.logits)[prompt()[1] != 0].max()
    assert difference > 1e-2 * np.abs(decoder.logits).max()
