"""Traced models, rewritten, against PyTorch: prefill in pieces, padding, holes, both cache modes.

Tiny models with large random weights, so that a lost window, softcap or rotation would show: the
logits are compared to 1e-5 of their size, and each feature moves them by more than a hundredth.
"""

import functools
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
from transformers import AutoConfig, AutoModelForCausalLM

from kvconv import names
from kvconv.converter.decoder_spec import DecoderSpec, describe
from kvconv.converter.rewrite import RewriteReport, read_graph, rewrite
from kvconv.converter.rewrite.graph import find
from kvconv.converter.simplify import simplify
from kvconv.converter.trace import trace
from kvconv.converter.weights import lay_out, save
from rewrite_graphs import open_session, run

_COS = names.FLASH_ATTENTION_INPUTS.index("cos")
VOCAB, BATCH, TOKENS, CAPACITY = 64, 3, 14, 17
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 16}


@dataclass(frozen=True)
class Case:
    """A model and what rewriting must find in it."""

    config: dict[str, Any]
    windows: tuple[int | None, ...] = (None, None)
    rotary: int = 2


CASES = {
    "llama": Case(_SIZES),
    "gemma3_text": Case(
        _SIZES | _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}, (4, None)
    ),
    "gemma2": Case(
        _SIZES | _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        (4, None),
    ),
    "gpt_neox": Case(_SIZES),
    "cohere": Case(_SIZES | {"logit_scale": 1.0}),
    "gpt2": Case(
        {
            "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        rotary=0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A traced model on disk, and PyTorch's logits [BATCH, TOKENS, VOCAB]."""

    path: Path
    case: Case
    spec: DecoderSpec
    logits: npt.NDArray[np.float32]


def prompt() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return input_ids, attention_mask (full, left padding, hole) and position_ids."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (BATCH, TOKENS))
    mask = np.ones((BATCH, TOKENS), np.int64)
    mask[1, :3] = 0
    mask[2, 4:6] = 0
    return ids, mask, np.clip(np.cumsum(mask, 1) - 1, 0, None)


@pytest.fixture(scope="module")
def traced_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traced]:
    """Return what traces a model once, however many tests want it."""
    return functools.cache(lambda name: _trace(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def traced(request: pytest.FixtureRequest, traced_models: Callable[[str], Traced]) -> Traced:
    """Return the model named by the test's parameter."""
    return traced_models(request.param)


def _trace(name: str, folder: Path) -> Traced:
    case = CASES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **case.config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.eval()
    spec = describe(model)
    ids, mask, positions = (torch.tensor(array) for array in prompt())
    arguments = {"position_ids": positions} if spec.has_position_ids else {}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **arguments).logits.numpy()
    graph = trace(model, spec, opset=23)
    lay_out(graph)
    simplify(graph)
    path = save(graph, folder)
    return Traced(path, case, spec, logits)


def rewritten(traced: Traced, attention: str) -> tuple[ort.InferenceSession, RewriteReport]:
    """Rewrite a traced model and open it."""
    graph = read_graph(traced.path)
    report = rewrite(graph, attention=attention, opset=23)
    return open_beside_weights(graph, traced, attention), report


def open_beside_weights(graph: gs.Graph, traced: Traced, name: str) -> ort.InferenceSession:
    """Write a graph into a folder of its own that holds the weights too, and open it."""
    folder = traced.path.parent / name
    folder.mkdir(exist_ok=True)
    weights = folder / names.WEIGHTS_FILE
    if not weights.exists():
        weights.hardlink_to(traced.path.with_name(names.WEIGHTS_FILE))
    return open_session(graph, folder)


def decode(session: ort.InferenceSession, spec: DecoderSpec, capacity: int) -> npt.NDArray:
    """Feed the prompt in pieces of 6, 1, 1 and 6 tokens; returns all logits.

    Args:
        session: A rewritten graph.
        spec: What it was traced from.
        capacity: Slots of a shared buffer, NaN at first; 0 for concat.
    """
    ids, mask, positions = prompt()
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
            size = (BATCH, shape.num_key_value_heads, capacity, width)
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


def assert_equals_pytorch(actual: npt.NDArray, traced: Traced) -> None:
    real = prompt()[1] != 0
    assert np.isfinite(actual).all()
    largest = np.abs(traced.logits).max()
    difference = np.abs(actual - traced.logits)[real].max()
    assert difference <= 1e-5 * largest, f"logits of up to {largest} differ by {difference}"


@pytest.mark.parametrize("traced", CASES, indirect=True)
def test_flash_equals_pytorch(traced: Traced) -> None:
    session, report = rewritten(traced, "flash")
    layers = len(traced.case.windows)
    assert report.windows == traced.case.windows
    assert report.counts["flash"] == report.counts["mask"] == layers
    assert report.counts["rotary"] == traced.case.rotary
    assert report.refusals == ()
    for capacity in (0, CAPACITY):
        assert_equals_pytorch(decode(session, traced.spec, capacity), traced)


@pytest.mark.parametrize("traced", CASES, indirect=True)
def test_standard_equals_pytorch(traced: Traced) -> None:
    session, report = rewritten(traced, "standard")
    assert report.windows == traced.case.windows
    assert report.refusals == ()
    assert_equals_pytorch(decode(session, traced.spec, 0), traced)


def _drop_window(node: gs.Node) -> None:
    node.attrs["window_size"] = 0


def _drop_softcap(node: gs.Node) -> None:
    node.attrs["softcap"] = 0.0


def _drop_rotary(node: gs.Node) -> None:
    node.attrs["rotary_dim"] = 0
    while len(node.inputs) > _COS:
        node.inputs.pop()


@pytest.mark.parametrize(
    ("traced", "drop"),
    [
        ("llama", _drop_rotary),
        ("gpt_neox", _drop_rotary),
        ("cohere", _drop_rotary),
        ("gemma3_text", _drop_rotary),
        ("gemma3_text", _drop_window),
        ("gemma2", _drop_window),
        ("gemma2", _drop_softcap),
    ],
    indirect=["traced"],
)
def test_flash_without_a_feature_differs(drop: Callable[[gs.Node], None], traced: Traced) -> None:
    """Equality above says something only where the feature moves the logits."""
    graph = read_graph(traced.path)
    rewrite(graph, attention="flash", opset=23)
    for node in find(graph, names.OP_NAME, names.OP_DOMAIN):
        drop(node)
    logits = decode(open_beside_weights(graph, traced, "altered"), traced.spec, 0)
    difference = np.abs(logits - traced.logits)[prompt()[1] != 0].max()
    assert difference > 1e-2 * np.abs(traced.logits).max()
