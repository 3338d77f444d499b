"""Graphs are read and written without the weights file, and mean the same afterwards."""

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

import rewrite_graphs as graphs
from kvconv import names
from kvconv.converter.rewrite import read_graph, rewrite, write_graph
from kvconv.converter.rewrite.graph import is_external
from rewrite_graphs import decoder
from tolerances import assert_close


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Write a traced decoder with all float weights in a file of their own."""
    path = tmp_path / "traced.onnx"
    onnx.save_model(
        gs.export_onnx(decoder()), path, save_as_external_data=True,
        location=names.WEIGHTS_FILE, size_threshold=128,
    )  # fmt: skip
    return path


def test_rewrite_needs_no_weights_file_and_leaves_references_as_they_are(
    stored: Path, tmp_path: Path
) -> None:
    weights = stored.with_name(names.WEIGHTS_FILE)
    hidden = weights.rename(tmp_path / "elsewhere")
    graph = read_graph(stored)
    before = {t.name: _reference(t) for t in graph.tensors().values() if is_external(t)}
    assert len(before) == 6
    rewrite(graph, attention="flash", opset=23)
    write_graph(graph, tmp_path / "rewritten.onnx")
    model = onnx.load(tmp_path / "rewritten.onnx", load_external_data=False)
    after = {
        t.name: {entry.key: entry.value for entry in t.external_data}
        for t in model.graph.initializer
        if t.data_location == onnx.TensorProto.EXTERNAL
    }
    assert after == before
    hidden.rename(weights)

    session = graphs.open_session(read_graph(tmp_path / "rewritten.onnx"), tmp_path)
    mask = graphs.make_mask(6, 4)
    feeds = graphs.make_feeds(graph, mask, 4)
    expected = graphs.run_traced(decoder(), feeds)["logits"]
    real = mask[:, 6:] != 0
    assert_close(graphs.run(session, feeds)["logits"][real], expected[real], "float32", "logits")


def _reference(tensor: gs.Constant) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor._values.tensor.external_data}


@pytest.mark.parametrize(
    ("attention", "domains"),
    [("flash", {"": 23, names.OP_DOMAIN: names.FLOAT_CACHES_OP_VERSION}), ("standard", {"": 23})],
)
def test_write_graph_imports_only_domains_in_use(
    attention: str, domains: dict[str, int], tmp_path: Path
) -> None:
    graph = decoder()
    rewrite(graph, attention=attention, opset=23)
    write_graph(graph, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import} == domains


def test_write_graph_keeps_num_logits_to_keep_overridable_when_read_again(tmp_path: Path) -> None:
    graph = decoder()
    rewrite(graph, attention="standard", opset=23)
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    write_graph(graph, first)
    write_graph(read_graph(first), second)
    assert first.read_bytes() == second.read_bytes()
    inputs = {entry.name for entry in onnx.load(second).graph.input}
    (initializer,) = (
        t for t in onnx.load(second).graph.initializer if t.name == names.NUM_LOGITS_TO_KEEP
    )
    assert names.NUM_LOGITS_TO_KEEP in inputs
    assert onnx.numpy_helper.to_array(initializer) == np.array(0)
    onnx.checker.check_model(str(second))


def test_types_that_numpy_lacks_leave_stdout_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BFLOAT16, [1]) for name in "xy"
    ]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "bfloat16", entries[:1], entries[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    read_graph(tmp_path / "model.onnx")
    assert capsys.readouterr().out == ""
