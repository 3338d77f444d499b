"""The weights that a step reads, counted in the graph."""

import sys

import onnx
import pytest
from onnx.external_data_helper import convert_model_to_external_data

from kvconv import names
from kvconv.bench.traffic import cache_bytes, weight_bytes
from kvconv.manifest import read_manifest
from kvconv.runtime import Bundle
from tiny_bundle import (
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_HEADS,
    VOCAB_SIZE,
    TinyDecoder,
    write_bundle,
    write_manifest,
)

_MATRICES = HIDDEN_SIZE * (2 * NUM_HEADS * HEAD_DIM + 2 * HEAD_DIM + VOCAB_SIZE)
_FEW = 500  # bytes of axes and scalars


@pytest.mark.parametrize("is_external", [False, True])
def test_matrices_count_and_looked_up_tables_do_not(tmp_path, is_external):
    folder = write_bundle(tmp_path / "bundle")
    model = TinyDecoder().graph("standard")
    if is_external:
        convert_model_to_external_data(model, location="model.onnx.data", size_threshold=64)
        onnx.save(model, folder / names.MODEL_FILE)
        write_manifest(folder, model)
    found = weight_bytes(Bundle.open(folder))
    assert 4 * _MATRICES <= found <= 4 * _MATRICES + _FEW


def test_table_that_is_also_multiplied_counts_once(tmp_path):
    folder = write_bundle(tmp_path / "bundle")
    model = TinyDecoder().graph("standard")
    last = model.graph.node[-1]
    assert last.op_type == "MatMul"
    model.graph.node.insert(
        len(model.graph.node) - 1,
        onnx.helper.make_node("Transpose", ["embedding"], ["tied"], perm=[1, 0]),
    )
    model.graph.node[-1].input[1] = "tied"
    onnx.save(model, folder / names.MODEL_FILE)
    write_manifest(folder, model)
    found = weight_bytes(Bundle.open(folder))
    assert 4 * _MATRICES <= found <= 4 * _MATRICES + _FEW


@pytest.mark.parametrize(
    ("dtype", "expected"),
    # 10 tokens with a key and a value of 8 numbers: 4 bytes each; 1 each; 20 and 16 bytes a group.
    [("float32", 10 * 64), ("int8", 10 * (16 + 4)), ("int4", 10 * (36 + 4))],
)
def test_cached_tokens_count_as_they_are_stored(tmp_path, dtype, expected):
    folder = write_bundle(tmp_path / "bundle", attention="flash", cache_dtype=dtype)
    assert cache_bytes(read_manifest(folder), 10) == expected


def test_weights_are_unknown_without_onnx(tmp_path, monkeypatch):
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert weight_bytes(bundle) is None
