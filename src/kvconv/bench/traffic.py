"""The bytes that a decode step must read: its weights once, and the cached keys and values."""

from kvconv.manifest import Manifest
from kvconv.names import MODEL_FILE
from kvconv.plan import kv_cache_bytes
from kvconv.runtime import Bundle

# These read a few rows of a table, whatever its size.
_ROW_READERS = frozenset({"Gather", "GatherBlockQuantized"})


def weight_bytes(bundle: Bundle) -> int | None:
    """Return the bytes of all weights that a step reads as a whole.

    Embeddings that only serve to look tokens up do not count; all experts of a mixture do.

    Returns:
        None where the onnx package is not installed: a machine that only runs bundles.
    """
    try:
        import onnx
        from onnx.external_data_helper import ExternalDataInfo
    except ModuleNotFoundError:
        return None
    graph = onnx.load(str(bundle.file(MODEL_FILE)), load_external_data=False).graph
    read_whole = {
        name for node in graph.node if node.op_type not in _ROW_READERS for name in node.input
    }
    total = 0
    for tensor in graph.initializer:
        if tensor.name in read_whole:
            is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
            length = ExternalDataInfo(tensor).length if is_external else tensor.ByteSize()
            total += int(length or 0)
    return total


def cache_bytes(manifest: Manifest, length: int) -> int:
    """Return the bytes of keys and values that a step reads for one row.

    Args:
        manifest: Of the bundle.
        length: Tokens in the cache; a windowed layer reads no more than its window.
    """
    return sum(
        kv_cache_bytes(
            [layer],
            batch_size=1,
            max_sequence_length=min(length, layer.window_size or length),
        )
        for layer in manifest.cache_layers
    )
