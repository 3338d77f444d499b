"""What a layer's cache is made of, against figures worked out by hand."""

import pytest

from kvconv.cache_layout import stored_tensors
from kvconv.manifest import CacheLayer


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", [("key", "float32", 64, 768), ("value", "float32", 33, 396)]),
        ("bfloat16", [("key", "bfloat16", 64, 384), ("value", "bfloat16", 33, 198)]),
        # 64 numbers are 2 groups, 33 are 2 as well, the second of 1.
        (
            "int8",
            [
                ("key", "int8", 64, 192),
                ("value", "int8", 33, 99),
                ("key_scale", "bfloat16", 2, 12),
                ("value_scale", "bfloat16", 2, 12),
            ],
        ),
        # 20 bytes a group of keys, 16 a group of values.
        (
            "int4",
            [
                ("key", "uint8", 40, 120),
                ("value", "uint8", 32, 96),
                ("key_scale", "bfloat16", 2, 12),
                ("value_scale", "bfloat16", 2, 12),
            ],
        ),
    ],
)
def test_tensors_have_the_types_widths_and_bytes_of_the_contract(dtype, expected):
    tensors = stored_tensors(CacheLayer(3, 64, 33, dtype))
    assert [(t.name, t.element, t.width, t.slot_bytes) for t in tensors] == expected
    assert [t.name for t in tensors if t.is_scale] == [name for name, *_ in expected[2:]]
    assert {t.num_heads for t in tensors} == {3}


def test_a_head_of_64_takes_what_was_promised():
    """Keys and values of one head and token: 512 bytes in float32."""
    found = {
        dtype: sum(t.slot_bytes for t in stored_tensors(CacheLayer(1, 64, 64, dtype)))
        for dtype in ("float32", "float16", "int8", "int4")
    }
    assert found == {"float32": 512, "float16": 256, "int8": 136, "int4": 80}
