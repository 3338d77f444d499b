"""Rule `ring`: a windowed layer keeps its newest tokens only.

    before   FlashAttention(window_size W, ...), past_key [B,K,past_sequence_length,H]
    after    FlashAttention(window_size W, cache_mode "ring", ..., past_sequence_length),
             past_key [B,K,ring_capacity_C,H] with C = `kvconv.manifest.ring_capacity`

Every key that a later token can see lies in the window, because the op's own window_size says so: a
window that stayed a bias proves nothing and leaves its layer as it is. A ring's size does not tell
how many tokens it has seen, so the graph takes the input past_sequence_length, and every layer
reads it; layers without a window then have a shared buffer, never a growing cache.
"""

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Editor, Outcome, Refusal, find, set_operand
from kvconv.manifest import ring_capacity

NAME = "ring"
_DIM = "ring_capacity_"
"""Dimension 2 of a ring's past and present, before its number."""
_PASTS = tuple(names.FLASH_ATTENTION_INPUTS.index(name) for name in ("past_key", "past_value"))
_PRESENTS = tuple(
    names.FLASH_ATTENTION_OUTPUTS.index(name) for name in ("present_key", "present_value")
)


def apply(editor: Editor) -> Outcome:
    """Make rings of all windowed layers whose ring is smaller than a cache of all tokens."""
    nodes = find(editor.graph, names.OP_NAME, names.OP_DOMAIN)
    rings = [(node, capacity) for node in nodes if (capacity := _pattern(editor, node)) is not None]
    for node, capacity in rings:
        _rewrite(node, capacity)
    if not rings:
        return Outcome(0)
    length = editor.add_input(names.PAST_SEQUENCE_LENGTH, np.int32, [1])
    for node in nodes:
        set_operand(node, "past_sequence_length", length)
    if editor.provider == "cuda":  # rule `length_input` says so of all its graphs
        return Outcome(len(rings))
    reason = (
        f"{len(rings)} of {len(nodes)} layers keep the tokens of their window only, which optimum "
        f"and onnxruntime-genai cannot drive; kvconv export --no-ring writes a bundle for them"
    )
    return Outcome(len(rings), (Refusal(NAME, names.PAST_SEQUENCE_LENGTH, reason),))


def read_capacities(graph: gs.Graph) -> dict[str, int]:
    """Return the capacity of each ring, by the name of its past keys."""
    return {
        node.inputs[_PASTS[0]].name: int(node.inputs[_PASTS[0]].shape[2].removeprefix(_DIM))
        for node in find(graph, names.OP_NAME, names.OP_DOMAIN)
        if is_ring(node)
    }


def is_ring(node: gs.Node) -> bool:
    """Tell whether a FlashAttention node's cache is a ring."""
    return bool(node.attrs.get("cache_mode") == "ring")


def _pattern(editor: Editor, node: gs.Node) -> int | None:
    """Return the capacity of the ring that a node's cache may become, or None."""
    if editor.max_sequence_length is None or is_ring(node) or not node.attrs["window_size"]:
        return None
    return ring_capacity(node.attrs["window_size"], editor.max_sequence_length)


def _rewrite(node: gs.Node, capacity: int) -> None:
    node.attrs["cache_mode"] = "ring"
    caches = [node.inputs[i] for i in _PASTS] + [node.outputs[i] for i in _PRESENTS]
    for cache in caches:
        batch, heads, _, width = cache.shape
        cache.shape = [batch, heads, f"{_DIM}{capacity}", width]
