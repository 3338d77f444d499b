"""Our attention and mask functions, as transformers calls them while a decoder is traced.

Importing this module registers both under one name. An attention function alone would not do:
transformers then passes no mask at all, and chunked attention is lost without a word. Models that
call PyTorch's attention function by themselves get one that spells attention out.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvconv import names
from kvconv.converter import mla
from kvconv.converter.swapped import swapped
from kvconv.errors import UnsupportedModelError

ATTENTION_NAME = "kvconv"
"""Name under which transformers knows our attention and mask functions."""

# Keywords of an attention call that change nothing about the result when the model is not trained.
_HARMLESS_KEYWORDS = frozenset({
    "dropout", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_embeddings", "position_ids", "use_cache",
})  # fmt: skip


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Stand for one attention call of transformers' attention interface.

    Args:
        module: The attention layer; knows its layer index.
        query: [batch_size, num_attention_heads, sequence_length, head_dim] (BNSH).
        key: [batch_size, num_key_value_heads, total_sequence_length, head_dim] (BNSH).
        value: Like key, of its own width.
        attention_mask: bool (True = attend) or float (added), broadcastable to
            [batch_size, num_attention_heads, sequence_length, total_sequence_length].
        scaling: Factor of the scores; None is 1/sqrt(head_dim).
        softcap: Bound of the scores; None or 0 is none.
        sliding_window: Tokens a query sees, itself included; None is all.
        is_causal: What an absent mask means; None asks the module.
        s_aux: Sinks, [num_attention_heads].
        keywords: Anything else a model passes; refused unless known to be harmless.

    Returns:
        Output [batch_size, sequence_length, num_attention_heads, value_head_dim], and no weights.
    """
    unknown = sorted(
        name
        for name, given in keywords.items()
        if given is not None and name not in _HARMLESS_KEYWORDS
    )
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} calls its attention with {', '.join(unknown)}, which kvconv "
            f"does not model yet."
        )
    query = mla.absorb(module, query)
    batch_size, num_heads, sequence_length, head_dim = query.shape
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = torch.onnx.ops.symbolic(
        f"{names.TRACE_DOMAIN}::{names.TRACE_ATTENTION}",
        (query, key, value, attention_mask, s_aux),
        {
            "layer_index": _layer_index(module),
            "num_heads": int(num_heads),
            "kv_num_heads": int(key.shape[1]),
            "head_dim": int(head_dim),
            "value_head_dim": int(value.shape[3]),
            "scale": float(head_dim**-0.5 if scaling is None else scaling),
            "softcap": float(softcap or 0),
            "window_size": int(sliding_window or 0),
            "is_causal": int(causal),
        },
        dtype=query.dtype,
        shape=(batch_size, sequence_length, num_heads, value.shape[3]),
        version=1,
    )
    return mla.expand(module, output), None


def _layer_index(module: torch.nn.Module) -> int:
    layer_index = getattr(module, "layer_idx", None)
    if not isinstance(layer_index, int):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not know its layer index (layer_idx), so kvconv cannot "
            f"tell which cache it uses."
        )
    return layer_index


def _mask(*positional: Any, **keywords: Any) -> torch.Tensor | None:
    """Build the boolean mask as for sdpa, but never leave it out because it is plainly causal."""
    keywords |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor | None = sdpa_mask(*positional, **keywords)
    return mask


def spelled_out_attention() -> AbstractContextManager[None]:
    """Make PyTorch's attention function leave MatMul, Softmax and MatMul in a graph."""
    return swapped(torch.nn.functional, scaled_dot_product_attention=_spelled_out)


def _spelled_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what `torch.nn.functional.scaled_dot_product_attention` does.

    Args:
        query: [batch_size, num_attention_heads, sequence_length, head_dim] (BNSH).
        key: [batch_size, num_key_value_heads, total_sequence_length, head_dim] (BNSH).
        value: Like key, of its own width.
        attn_mask: bool (True = attend) or float (added), broadcastable to the scores.
        dropout_p: Must be 0.
        is_causal: Mask later slots, counted from the first for both queries and keys.
        scale: Factor of the scores; None is 1/sqrt(head_dim).
        enable_gqa: Repeat keys and values for the query heads that share them.
    """
    if dropout_p:
        raise UnsupportedModelError(
            f"attention drops {dropout_p} of its weights; call model.eval()"
        )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(dim=-1) @ value


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)
