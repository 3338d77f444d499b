"""Bundles that are wrong in one way, with manifests that say all files are right."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from kvconv import names
from kvconv.manifest import file_entry, read_manifest


def copy_wrong(bundle: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    """Copy a bundle, change the copy, and list the changed files in its manifest."""
    shutil.copytree(bundle, folder)
    change(folder)
    manifest = read_manifest(folder)
    files = {name: file_entry(folder / name) for name in manifest.files}
    dataclasses.replace(manifest, files=files).write(folder)
    return folder


def change_weight(folder: Path) -> None:
    """Add 2 to one element of the first MLP weight, which every token passes."""
    graph = onnx.load(folder / names.MODEL_FILE, load_external_data=False).graph
    weight = next(w for w in graph.initializer if sorted(w.dims) == [32, 48])
    place = {entry.key: entry.value for entry in weight.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
    data = np.memmap(
        folder / place["location"], dtype, "r+", offset=int(place["offset"]), shape=32 * 48
    )
    data[100] += 2
    data.flush()


def drop_window(folder: Path) -> None:
    """Let queries of every layer see all tokens."""
    _change_attention(folder, lambda node: _set_attribute(node, "window_size", 0))


def narrow_window(folder: Path) -> None:
    """Hide the oldest token of each window, which a ring still holds."""

    def narrow(node: onnx.NodeProto) -> bool:
        if not any(a.name == "cache_mode" and a.s == b"ring" for a in node.attribute):
            return False
        return _set_attribute(node, "window_size", _attribute(node, "window_size").i - 1)

    _change_attention(folder, narrow)


def drop_softcap(folder: Path) -> None:
    """Leave the scores as they are."""
    _change_attention(folder, lambda node: _set_attribute(node, "softcap", 0.0))


def drop_sinks(folder: Path) -> None:
    """Let the weights of a query's tokens add up to 1."""
    _change_attention(folder, lambda node: bool(_take_input(node, "head_sink")))


def drop_alibi(folder: Path) -> None:
    """Weigh near and far tokens alike."""
    _change_attention(folder, lambda node: bool(_take_input(node, "alibi_slopes")))


def drop_chunks(folder: Path) -> None:
    """Turn every mask that is a bias into the plain causal one."""

    def drop(node: onnx.NodeProto) -> bool:
        if not _take_input(node, "attention_bias"):
            return False
        node.input[names.FLASH_ATTENTION_INPUTS.index("attention_mask")] = names.ATTENTION_MASK
        return _set_attribute(node, "causal", 1)

    _change_attention(folder, drop)


def rotate_all_of_a_head(folder: Path) -> None:
    """Rotate whole heads of 8 where only a part is rotated: the table is repeated to fit."""
    repeated: dict[str, onnx.NodeProto] = {}

    def widen(node: onnx.NodeProto) -> bool:
        for side in ("cos", "sin"):
            index = names.FLASH_ATTENTION_INPUTS.index(side)
            table = node.input[index]
            if table not in repeated:
                copies = 4 // (_attribute(node, "rotary_dim").i // 2)
                wide = f"{table}_repeated"
                repeated[table] = helper.make_node("Concat", [table] * copies, [wide], axis=-1)
            node.input[index] = repeated[table].output[0]
        return _set_attribute(node, "rotary_dim", 8)

    _change_attention(folder, widen, after=repeated)


def rotate_halves(folder: Path) -> None:
    """Pair element i with i + R/2 where neighbours are paired."""
    _change_attention(folder, lambda node: _set_attribute(node, "rotary_interleaved", 0))


def skip_query_key_norm(folder: Path) -> None:
    """Feed the op from the projections, past the norms in between."""
    graph = onnx.load(folder / names.MODEL_FILE, load_external_data=False).graph
    norms = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == names.HEAD_RMS_NORMALIZATION
    }

    def skip(node: onnx.NodeProto) -> bool:
        is_normed = node.input[0] in norms
        node.input[0] = norms.get(node.input[0], node.input[0])
        return is_normed

    _change_attention(folder, skip)


def unscale_rope(folder: Path) -> None:
    """Rotate with the frequencies of plain rotary embedding, theta 10000, 8 dimensions."""
    path = folder / names.MODEL_FILE
    model = onnx.load(path, load_external_data=False)
    plain = (10000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
    changed = False
    for weight in model.graph.initializer:
        if len(weight.external_data) or np.prod(weight.dims) != plain.size:
            continue
        values = numpy_helper.to_array(weight)
        if values.dtype == np.float32 and values.flat[0] < plain[0] and (values > 0).all():
            tensor = numpy_helper.from_array(plain.reshape(values.shape), weight.name)
            weight.CopyFrom(tensor)
            changed = True
    assert changed
    path.write_bytes(model.SerializeToString())


def ignore_padding(folder: Path) -> None:
    """Give the op a mask of ones."""

    def ignore(node: onnx.NodeProto) -> bool:
        index = names.FLASH_ATTENTION_INPUTS.index("attention_mask")
        was, node.input[index] = node.input[index], "all_ones"
        return was == names.ATTENTION_MASK

    one = helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    ones = [
        helper.make_node("Shape", [names.ATTENTION_MASK], ["mask_shape"]),
        helper.make_node("ConstantOfShape", ["mask_shape"], ["all_ones"], value=one),
    ]
    _change_attention(folder, ignore, ones)


def swap_cos_and_sin(folder: Path) -> None:
    """Rotate queries and keys wrongly."""

    def swap(node: onnx.NodeProto) -> bool:
        cos, sin = (names.FLASH_ATTENTION_INPUTS.index(name) for name in ("cos", "sin"))
        node.input[cos], node.input[sin] = node.input[sin], node.input[cos]
        return bool(node.input[cos] and node.input[sin])

    _change_attention(folder, swap)


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == name)


def _set_attribute(node: onnx.NodeProto, name: str, value: float) -> bool:
    """Set an attribute that the node has; returns whether that changed it."""
    attribute = _attribute(node, name)
    changed = helper.get_attribute_value(attribute) != value
    attribute.CopyFrom(helper.make_attribute(name, value))
    return bool(changed)


def _take_input(node: onnx.NodeProto, name: str) -> str:
    """Leave out an optional input; returns what it was, or nothing."""
    index = names.FLASH_ATTENTION_INPUTS.index(name)
    if index >= len(node.input):
        return ""
    was, node.input[index] = node.input[index], ""
    return str(was)


def _change_attention(
    folder: Path,
    change: Callable[[onnx.NodeProto], bool],
    before: list[onnx.NodeProto] | None = None,
    after: dict[str, onnx.NodeProto] | None = None,
) -> None:
    """Change FlashAttention nodes; at least one change must say that it did something.

    Args:
        folder: The bundle.
        change: Changes one node in place; returns whether it did.
        before: Nodes that read graph inputs only.
        after: Name of a value -> a node that reads it; filled by `change`.
    """
    path = folder / names.MODEL_FILE
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == names.OP_NAME]
    assert any([change(node) for node in nodes])  # a list: all nodes are changed
    for index, node in enumerate(before or []):
        model.graph.node.insert(index, node)
    for value, reader in (after or {}).items():
        place = next(i for i, node in enumerate(model.graph.node) if value in node.output)
        model.graph.node.insert(place + 1, reader)
    path.write_bytes(model.SerializeToString())
