"""Rule `stored_cache`: keys and values are stored as another type than the activations'.

Letters: B batch, K key/value heads, C slots, H and Hv widths, W stored widths, G groups of a head.

    before   past_key [B,K,C,H]   past_value [B,K,C,Hv]
             -> FlashAttention -> present_key, present_value
    after    the same in another type, [B,K,C,W]; if that is quantised, beside them
             past_key_scale   past_value_scale [B,K,C,G] bfloat16
             -> FlashAttention -> present_key_scale, present_value_scale

`kvconv.cache_layout` says which types and widths. The op rounds what it stores, so no other node
changes; the graph's inputs and outputs do.
"""

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.cache_layout import ElementType, StoredTensor, stored_tensors
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    find,
    operand_heads,
    set_operand,
)
from kvconv.manifest import CacheLayer

NAME = "stored_cache"
_PAST_KEY = names.FLASH_ATTENTION_INPUTS.index("past_key")
_GRAPH_TYPES: dict[ElementType, object] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": int(onnx.TensorProto.BFLOAT16),  # numpy has none
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}


def apply(editor: Editor) -> Outcome:
    """Retype the cache of every FlashAttention node that has another type."""
    dtype = editor.cache_dtype
    if dtype is None:
        return Outcome(0)
    count = 0
    for node in find(editor.graph, names.OP_NAME, names.OP_DOMAIN):
        heads = operand_heads(node)
        (kv_heads, key_width), (_, value_width) = heads["key"], heads["value"]
        tensors = stored_tensors(CacheLayer(kv_heads, key_width, value_width, dtype))
        if node.inputs[_PAST_KEY].dtype != _GRAPH_TYPES[tensors[0].element]:
            _rewrite(editor.graph, node, tensors)
            count += 1
    return Outcome(count)


def _rewrite(graph: gs.Graph, node: gs.Node, tensors: tuple[StoredTensor, ...]) -> None:
    past_key = node.inputs[_PAST_KEY]
    layer = next(i for i in range(len(graph.inputs)) if names.past_key(i) == past_key.name)
    pasts = [past_key, node.inputs[_PAST_KEY + 1]]
    for tensor in tensors[2:]:
        pasts.append(gs.Variable(names.past(layer, tensor.name), shape=past_key.shape))
        present = gs.Variable(names.present(layer, tensor.name), shape=node.outputs[1].shape)
        set_operand(node, f"past_{tensor.name}", pasts[-1])
        node.outputs.append(present)
        graph.inputs.append(pasts[-1])
        graph.outputs.append(present)
    for tensor, past, present in zip(tensors, pasts, node.outputs[1:], strict=True):
        for side in (past, present):
            side.dtype = _GRAPH_TYPES[tensor.element]
            side.shape = [*side.shape[:3], tensor.width]
