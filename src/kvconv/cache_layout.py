"""How the cache of a layer lies in memory: one table for converter, runtime and plan.

Float caches are two tensors, key and value. Quantised ones have bfloat16 scales beside them, one
for each group of 32 numbers of a head (the last group may be shorter):

    int8         a byte a number
    int4 value   16 bytes a group: two numbers of 4 bits each
    int4 key     20 bytes a group: 5 bits a number, because scores feel keys more than values
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvconv import names
from kvconv.manifest import CacheLayer

GROUP_WIDTH = 32
"""Numbers of a head that share a scale."""

ElementType = Literal["float32", "float16", "bfloat16", "int8", "uint8"]
ELEMENT_BYTES: Mapping[ElementType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
}
_INT4_GROUP_BYTES = {"key": 20, "value": 16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a layer's cache: [batch_size, num_heads, slots, width].

    Attributes:
        name: `key`, `value`, `key_scale` or `value_scale`: the end of its graph names.
        element: Type of what is stored.
        num_heads: Heads stored.
        width: Elements of one head of one token.
    """

    name: names.CacheTensorName
    element: ElementType
    num_heads: int
    width: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token of one row."""
        return self.num_heads * self.width * ELEMENT_BYTES[self.element]

    @property
    def is_scale(self) -> bool:
        """Whether it holds the scales of another one."""
        return self.name in ("key_scale", "value_scale")


def stored_tensors(layer: CacheLayer) -> tuple[StoredTensor, ...]:
    """Return the tensors of a layer's cache: key and value, then their scales if it has any."""
    heads = layer.num_key_value_heads
    widths = {"key": layer.key_head_dim, "value": layer.value_head_dim}
    groups = {name: -(-width // GROUP_WIDTH) for name, width in widths.items()}
    element: ElementType = "uint8" if layer.dtype == "int4" else layer.dtype
    if layer.dtype == "int4":
        widths = {name: _INT4_GROUP_BYTES[name] * groups[name] for name in widths}
    tensors = (
        StoredTensor("key", element, heads, widths["key"]),
        StoredTensor("value", element, heads, widths["value"]),
    )
    if layer.dtype not in ("int8", "int4"):
        return tensors
    return (
        *tensors,
        StoredTensor("key_scale", "bfloat16", heads, groups["key"]),
        StoredTensor("value_scale", "bfloat16", heads, groups["value"]),
    )
