"""The CUDA kernels as an input of the graph, which is how the op finds them.

The file of kernels is the external data of an initializer that every FlashAttention node reads.
ONNX Runtime looks for it beside the model, so a bundle may be moved, and no program has to say
where its kernels are.
"""

from pathlib import Path

import onnx

from kvconv import names

_INDEX = names.FLASH_ATTENTION_INPUTS.index("kernels")


def attach(model_path: Path, size_bytes: int) -> None:
    """Let every FlashAttention node of a model read the file of kernels beside it.

    Doing it again changes the size only.

    Args:
        model_path: The model; rewritten. Its weights are not read.
        size_bytes: Bytes of `names.KERNELS_FILE`.
    """
    model = onnx.load(model_path, load_external_data=False)
    kernels = next(
        (entry for entry in model.graph.initializer if entry.name == names.KERNELS_INITIALIZER),
        None,
    )
    if kernels is None:
        kernels = model.graph.initializer.add(name=names.KERNELS_INITIALIZER)
    kernels.data_type = onnx.TensorProto.UINT8
    kernels.data_location = onnx.TensorProto.EXTERNAL
    del kernels.dims[:], kernels.external_data[:]
    kernels.dims.append(size_bytes)
    for key, value in (("location", names.KERNELS_FILE), ("offset", "0"), ("length", size_bytes)):
        kernels.external_data.add(key=key, value=str(value))
    for node in model.graph.node:
        if (node.op_type, node.domain) == (names.OP_NAME, names.OP_DOMAIN):
            del node.input[_INDEX:]
            node.input.extend([""] * (_INDEX - len(node.input)) + [names.KERNELS_INITIALIZER])
    for entry in model.opset_import:
        if entry.domain == names.OP_DOMAIN:
            entry.version = max(entry.version, names.OP_VERSION)
    model_path.write_bytes(model.SerializeToString())
