"""Caches of another type than the activations': the graph's inputs and outputs, and who packs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import read_graph, rewrite, write_graph
from kvconv.converter.rewrite.graph import find, get_operand, operand_heads
from kvconv.manifest import CacheDtype

FLOAT, FLOAT16, BFLOAT16, INT8, UINT8 = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.INT8,
    onnx.TensorProto.UINT8,
)
SIZES = {"head_dim": 40, "value_head_dim": 64, "kv_heads": 2}
"""Two groups of keys, the second one short, and two of values."""


def signature(graph: gs.Graph, folder: Path) -> dict[str, tuple[int, int]]:
    """Return the type and the last dimension of everything cached, as the file says it."""
    path = folder / names.MODEL_FILE
    write_graph(graph, path)
    model = onnx.load(path).graph
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            value.type.tensor_type.shape.dim[3].dim_value,
        )
        for value in (*model.input, *model.output)
        if value.name.startswith(("past_key_values.", "present."))
    }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", {"key": (FLOAT, 40), "value": (FLOAT, 64)}),
        ("float16", {"key": (FLOAT16, 40), "value": (FLOAT16, 64)}),
        ("bfloat16", {"key": (BFLOAT16, 40), "value": (BFLOAT16, 64)}),
        (
            "int8",
            {"key": (INT8, 40), "value": (INT8, 64)}
            | {"key_scale": (BFLOAT16, 2), "value_scale": (BFLOAT16, 2)},
        ),
        (
            "int4",
            {"key": (UINT8, 40), "value": (UINT8, 32)}  # 2 groups of 20 and of 16 bytes
            | {"key_scale": (BFLOAT16, 2), "value_scale": (BFLOAT16, 2)},
        ),
    ],
)
def test_cache_has_the_types_and_widths_of_its_dtype(
    tmp_path: Path, dtype: CacheDtype, expected: dict[Any, tuple[int, int]]
) -> None:
    graph = graphs.decoder(masks=(graphs.bool_mask(), graphs.bool_mask(window=3)), **SIZES)
    report = rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
    assert report.counts["stored_cache"] == (0 if dtype == "float32" else 2)
    assert signature(graph, tmp_path) == {
        name(layer, tensor): found
        for name in (names.past, names.present)
        for layer in range(2)
        for tensor, found in expected.items()
    }
    has_scales = "key_scale" in expected
    for layer, node in enumerate(find(graph, names.OP_NAME, names.OP_DOMAIN)):
        operands = {
            name: get_operand(node, f"past_{name}") for name in ("key_scale", "value_scale")
        }
        found = {name: tensor.name for name, tensor in operands.items() if tensor is not None}
        assert found == {name: names.past(layer, name) for name in operands if has_scales}
        assert [tensor.name for tensor in node.outputs[1:]] == [
            names.present(layer, tensor) for tensor in expected
        ]
    imports = {e.domain: e.version for e in onnx.load(tmp_path / names.MODEL_FILE).opset_import}
    assert imports[names.OP_DOMAIN] == (
        names.RING_OP_VERSION if has_scales else names.FLOAT_CACHES_OP_VERSION
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_rewriting_again_changes_nothing(tmp_path: Path, dtype: CacheDtype, head_dim: int) -> None:
    graph = graphs.normed_decoder(head_dim=head_dim)
    rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
    before = signature(graph, tmp_path)
    graph = read_graph(tmp_path / names.MODEL_FILE)
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    assert operand_heads(node) == {
        "query": (4, head_dim), "key": (2, head_dim), "value": (2, head_dim)
    }  # fmt: skip
    again = rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
    assert set(again.counts.values()) == {0}
    assert signature(graph, tmp_path) == before


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_head_dim", "packs"),
    [
        ("int4", 32, 64, True),
        ("int4", 16, 32, False),  # an int4 cache tells whole groups only
        ("int4", 32, 16, False),
        ("int8", 16, 24, True),
        ("float16", 16, 24, True),
    ],
)
@pytest.mark.parametrize(
    ("build", "rule"),
    [(graphs.decoder, "packed_qkv"), (graphs.normed_decoder, "head_norm")],
)
def test_projections_stay_packed_where_the_cache_tells_the_width(
    build: Any, rule: str, dtype: CacheDtype, head_dim: int, value_head_dim: int, packs: bool
) -> None:
    graph = build(head_dim=head_dim, value_head_dim=value_head_dim)
    if build is graphs.decoder:
        graphs.pack_projections(graph)
    report = rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
    assert report.counts[rule] == packs
    (node,) = find(graph, names.OP_NAME, names.OP_DOMAIN)
    assert (get_operand(node, "key") is None) == packs
    assert report.counts["stored_cache"] == 1


def test_narrow_cache_holds_what_the_wide_one_does_rounded(tmp_path: Path) -> None:
    feeds = graphs.make_feeds(graphs.decoder(), graphs.make_mask(0, 5), 5)
    found = {}
    for dtype in ("float32", "float16"):
        graph = graphs.decoder()
        rewrite(graph, attention="flash", opset=23, cache_dtype=dtype)
        wanted = {t.name: t.dtype for t in graph.inputs}
        cast = {name: value.astype(wanted[name]) for name, value in feeds.items()}
        found[dtype] = graphs.run(graphs.open_session(graph, tmp_path), cast)
    for name in (names.present_key(0), names.present_value(0)):
        narrow, wide = (found[dtype][name] for dtype in ("float16", "float32"))
        assert narrow.dtype == np.float16
        np.testing.assert_array_equal(narrow, wide.astype(np.float16))
    assert 0 < np.abs(found["float16"][names.LOGITS] - found["float32"][names.LOGITS]).max() < 0.01
