"""Graph names, file names and operator names, spelled once.

The graph names are the ecosystem's: optimum and onnxruntime-genai use the same.
"""

from typing import Literal

INPUT_IDS = "input_ids"
"""int64 [batch_size, sequence_length]."""
ATTENTION_MASK = "attention_mask"
"""int64 [batch_size, total_sequence_length], 1 = attend; column j is cache slot j."""
POSITION_IDS = "position_ids"
"""int64 [batch_size, sequence_length]."""
PAST_SEQUENCE_LENGTH = "past_sequence_length"
"""int32 [1], tokens in the cache, padding included; of graphs with rings only."""
NUM_LOGITS_TO_KEEP = "num_logits_to_keep"
"""int64 scalar, an overridable initializer; 0 (the default) keeps the logits of all positions."""
LOGITS = "logits"
"""float32 [batch_size, sequence_length or num_logits_to_keep, vocab_size]."""

DIM_BATCH = "batch_size"
DIM_SEQUENCE = "sequence_length"
DIM_PAST = "past_sequence_length"
DIM_TOTAL = "total_sequence_length"

OP_DOMAIN = "kvconv"
OP_NAME = "FlashAttention"
GATED_ACTIVATION = "GatedActivation"
SKIP_RMS_NORMALIZATION = "SkipRMSNormalization"
SKIP_LAYER_NORMALIZATION = "SkipLayerNormalization"
HEAD_RMS_NORMALIZATION = "HeadRMSNormalization"
OP_VERSION = 3
"""Version of the operator domain that this kvconv runs; 3 brought rings and quantised caches.

Graphs say the least version that has what they use.
"""
FLOAT_CACHES_OP_VERSION = 2
"""Least version of graphs without rings and quantised caches.

Version 1 had other layouts of quantised weights; all else is the same.
"""

ORT_DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""
GROUP_QUERY_ATTENTION = "GroupQueryAttention"

MATMUL_NBITS = "MatMulNBits"
GATHER_NBITS = "GatherBlockQuantized"
"""Operators on quantised weights: ONNX Runtime's and kvconv's own have the same names."""

TRACE_DOMAIN = "kvconv.trace"
"""Domain of the placeholder nodes that tracing writes; no finished model contains one."""
TRACE_ATTENTION = "Attention"
TRACE_EXPERTS = "ExpertsLinear"

FLASH_ATTENTION_INPUTS = (
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "attention_mask",
    "cos",
    "sin",
    "attention_bias",
    "alibi_slopes",
    "head_sink",
    "past_key_scale",
    "past_value_scale",
    "past_sequence_length",
)
"""Inputs of kvconv::FlashAttention in order; all after past_value are optional.

key and value may be absent together: query is then [batch, sequence, (num_heads + kv_num_heads) *
head_dim + kv_num_heads * value_head_dim], each token's query heads, key heads and value heads.
"""
FLASH_ATTENTION_OUTPUTS = (
    "output",
    "present_key",
    "present_value",
    "present_key_scale",
    "present_value_scale",
)

DOWNLOAD_STAGE = "download"
"""The stage of an export that draws progress bars of its own."""

MANIFEST_FILE = "kvconv.json"
MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
LIBRARY_FILE = "libkvconv_ops.so"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENAI_CONFIG_FILE = "genai_config.json"


CacheTensorName = Literal["key", "value", "key_scale", "value_scale"]


def past(layer_index: int, tensor: CacheTensorName) -> str:
    """Return the graph input that holds a tensor of a layer's cache."""
    return f"past_key_values.{layer_index}.{tensor}"


def present(layer_index: int, tensor: CacheTensorName) -> str:
    """Return the graph output that holds a tensor of a layer's cache after the run."""
    return f"present.{layer_index}.{tensor}"


def past_key(layer_index: int) -> str:
    """Return the graph input that holds a layer's cached keys."""
    return past(layer_index, "key")


def past_value(layer_index: int) -> str:
    """Return the graph input that holds a layer's cached values."""
    return past(layer_index, "value")


def present_key(layer_index: int) -> str:
    """Return the graph output that holds a layer's keys after the run."""
    return present(layer_index, "key")


def present_value(layer_index: int) -> str:
    """Return the graph output that holds a layer's values after the run."""
    return present(layer_index, "value")
