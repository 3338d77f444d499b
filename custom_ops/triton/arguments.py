"""The arguments of the kernels: what the pack calls them, and what Triton is told of them.

The launcher (custom_ops/src/cuda/) passes a value for each id; the two must agree.
"""

from typing import NamedTuple

ALIGNMENT = 16
"""What addresses and strides are multiples of, which lets Triton load 16 bytes at once."""


class Argument(NamedTuple):
    """One argument that a kernel may take.

    Attributes:
        id: Its number in a pack.
        type: As Triton spells it; `ACTIVATION` and `CACHE` stand for a variant's own types.
        aligned: Whether the launcher makes sure that it is a multiple of `ALIGNMENT`.
    """

    id: int
    type: str
    aligned: bool = False


ACTIVATION = "*activation"
CACHE = "*cache"

ARGUMENTS = {
    "query": Argument(1, ACTIVATION, True),
    "key": Argument(2, ACTIVATION, True),
    "value": Argument(3, ACTIVATION, True),
    "present_key": Argument(4, CACHE, True),
    "present_value": Argument(5, CACHE, True),
    "present_key_scale": Argument(6, "*bf16", True),
    "present_value_scale": Argument(7, "*bf16", True),
    "attention_mask": Argument(8, "*i64", True),
    "cos": Argument(9, "*fp32", True),
    "sin": Argument(10, "*fp32", True),
    "attention_bias": Argument(11, ACTIVATION, True),
    "alibi_slopes": Argument(12, "*fp32", True),
    "head_sink": Argument(13, "*fp32", True),
    # One number, wherever it lies.
    "past_sequence_length": Argument(14, "*i32"),
    "output": Argument(15, ACTIVATION, True),
    "partial_output": Argument(16, "*fp32", True),
    "partial_maximum": Argument(17, "*fp32", True),
    "partial_sum": Argument(18, "*fp32", True),
    "query_token_stride": Argument(32, "i32", True),
    "key_token_stride": Argument(33, "i32", True),
    "value_token_stride": Argument(34, "i32", True),
    "sequence_length": Argument(40, "i32"),
    "capacity": Argument(41, "i32"),
    "mask_width": Argument(42, "i32"),
    "num_heads": Argument(43, "i32"),
    "kv_num_heads": Argument(44, "i32"),
    "rotary_batch_stride": Argument(45, "i32"),
    "bias_stride_batch": Argument(46, "i32"),
    "bias_stride_head": Argument(47, "i32"),
    "bias_stride_query": Argument(48, "i32"),
    "bias_stride_slot": Argument(49, "i32"),
    "window_size": Argument(50, "i32"),
    "num_splits": Argument(51, "i32"),
    "slots_per_split": Argument(52, "i32"),
    "scale": Argument(64, "fp32"),
    "softcap": Argument(65, "fp32"),
}
"""In the order in which a kernel declares those that it takes."""

NAMES = {argument.id: name for name, argument in ARGUMENTS.items()}


def size_bytes(argument: Argument) -> int:
    """Return the bytes that an argument takes in a launch."""
    return 8 if argument.type.startswith("*") else 4


_QUANTIZED = frozenset({"present_key_scale", "present_value_scale"})
_ROTARY = frozenset({"cos", "sin", "rotary_batch_stride"})
_BIAS = frozenset({name for name in ARGUMENTS if "bias" in name})
_CACHE = frozenset(
    {"present_key", "present_value", "past_sequence_length", "sequence_length", "capacity"}
) | {"kv_num_heads"}
_ATTEND = _CACHE | {"query", "query_token_stride", "num_heads", "scale"}
_PARTIALS = frozenset({"partial_output", "partial_maximum", "partial_sum", "num_splits"})

# What a kind of kernel takes in any case, and what it takes where a feature is on.
ALWAYS = {
    "append": _CACHE | {"key", "value", "key_token_stride", "value_token_stride"},
    "prefill": _ATTEND | {"output"},
    "decode": (_ATTEND | _PARTIALS | {"slots_per_split"}) - {"sequence_length"},
    "combine": _PARTIALS | {"output", "num_heads"},
}
OF_CACHE = {"append": _QUANTIZED, "prefill": _QUANTIZED, "decode": _QUANTIZED}
_ATTEND_FEATURES = {
    "rotary": _ROTARY,
    "mask": frozenset({"attention_mask", "mask_width"}),
    "bias": _BIAS,
    "alibi": frozenset({"alibi_slopes"}),
    "softcap": frozenset({"softcap"}),
    "window": frozenset({"window_size"}),
}
OF_FEATURE: dict[str, dict[str, frozenset[str]]] = {
    "append": {"rotary": _ROTARY},
    "prefill": {**_ATTEND_FEATURES, "sink": frozenset({"head_sink"})},
    # One query: its stride in the bias is never taken.
    "decode": {**_ATTEND_FEATURES, "bias": _BIAS - {"bias_stride_query"}},
    "combine": {"sink": frozenset({"head_sink"})},
}
