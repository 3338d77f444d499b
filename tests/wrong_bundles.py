"""Bundles that are wrong in one way, with manifests that say all files are right."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

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

    def drop(node: onnx.NodeProto) -> bool:
        changed = False
        for attribute in node.attribute:
            if attribute.name == "window_size" and attribute.i:
                attribute.i, changed = 0, True
        return changed

    _change_attention(folder, drop)


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


def _change_attention(
    folder: Path,
    change: Callable[[onnx.NodeProto], bool],
    before: list[onnx.NodeProto] | None = None,
) -> None:
    """Change FlashAttention nodes; at least one change must say that it did something."""
    path = folder / names.MODEL_FILE
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == names.OP_NAME]
    assert any([change(node) for node in nodes])  # a list: all nodes are changed
    for index, node in enumerate(before or []):
        model.graph.node.insert(index, node)
    path.write_bytes(model.SerializeToString())
