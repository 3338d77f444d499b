"""What a run allocates: its length at most, and bytes from a cache spec alone.

The same figures serve `inspect`, `run --stats` and the runtime before it allocates.
"""

from collections.abc import Sequence

from kvconv.manifest import CacheLayer

PREFILL_CHUNK_TOKENS = 512
"""Tokens per row in one run of a prefill: bounds the activations, and lets Ctrl-C through."""

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_cache_bytes(
    cache_layers: Sequence[CacheLayer], *, batch_size: int, max_sequence_length: int
) -> int:
    """Return the bytes of all key and value buffers.

    Args:
        cache_layers: One entry per layer.
        batch_size: Sequences held at once.
        max_sequence_length: Capacity in tokens; a ring layer holds at most its own capacity.
    """
    total = 0
    for layer in cache_layers:
        tokens = max_sequence_length if layer.capacity is None else layer.capacity
        width = layer.num_key_value_heads * (layer.key_head_dim + layer.value_head_dim)
        total += batch_size * tokens * width * BYTES_PER_ELEMENT[layer.dtype]
    return total
