"""What `kvconv plan` advises: one sentence each, with the figures that are its reason."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvconv.manifest import CacheDtype, CacheLayer, ring_capacity
from kvconv.plan import (
    SCORES_COPIES,
    DecoderSizes,
    Plan,
    kv_cache_bytes,
    score_bytes,
)

_DOMINANT = 0.5
"""Part of the total from which the cache is what to save on."""
_WORTH_SAYING = 0.1
_PAGED_BATCH = 4
_LATER = "this version does not have that"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model or a bundle that is planned.

    Attributes:
        name: Of the model.
        architecture: Class name.
        max_sequence_length: Most tokens that it holds; None if its config is silent.
        weights_dtype: Of linear weights.
        cache_dtype: Of keys and values.
        dtype: Of activations.
        sizes: What decides the memory.
    """

    name: str
    architecture: str
    max_sequence_length: int | None
    weights_dtype: str
    cache_dtype: CacheDtype
    dtype: str
    sizes: DecoderSizes


def advice(subject: Subject, planned: Plan, memory_bytes: int | None) -> list[str]:
    """Return what would help, the most pressing first.

    Args:
        subject: What is planned.
        planned: Its memory.
        memory_bytes: What it should fit into; None if nobody knows.
    """
    sentences: list[str] = []
    does_not_fit = memory_bytes is not None and planned.total > memory_bytes
    loaded = planned.weights + planned.packed
    is_float = subject.weights_dtype.startswith("float")
    is_too_much = memory_bytes is not None and loaded + planned.program > memory_bytes
    if is_float and (is_too_much or loaded >= _DOMINANT * planned.total):
        sentences.append(
            f"take --weights int4, which has 4 to 8 bits a weight: float weights are "
            f"{loaded / planned.total:.0%} of the total"
        )
    elif is_too_much:
        sentences.append(
            f"take a smaller model: weights and program alone are "
            f"{_size(loaded + planned.program)}, whatever batch and context"
        )
    share = planned.cache_bytes / planned.total
    if share >= _DOMINANT:
        sentences.append(
            f"save on the cache: it is {share:.0%} of the total, and grows with batch and context"
        )
    if share >= _WORTH_SAYING or does_not_fit:
        sentences += _cache_advice(subject, planned)
    sentences += _flash_advice(subject, planned)
    if planned.batch_size >= _PAGED_BATCH and share >= _WORTH_SAYING:
        sentences.append(
            f"serve from pages if rows differ in length: each row holds {planned.context} slots "
            f"from the start, and rows that are half full leave "
            f"{_size(planned.cache_bytes // 2)} idle; {_LATER}"
        )
    return sentences


def _cache_advice(subject: Subject, planned: Plan) -> list[str]:
    """Return what a smaller cache would save: smaller elements, rings, fewer heads."""
    now, sentences = planned.cache_bytes, []
    layers = subject.sizes.cache_layers
    smaller: list[CacheDtype] = ["float16", "int8", "int4"]
    sizes = {
        dtype: _cache_bytes([dataclasses.replace(layer, dtype=dtype) for layer in layers], planned)
        for dtype in smaller
    }
    listed = ", ".join(f"{dtype} {_size(size)}" for dtype, size in sizes.items() if size < now)
    if listed:
        sentences.append(
            f"smaller elements: with --kv-cache-dtype {_size(now)} of cache would be {listed}"
        )
    sentences += _ring_advice(subject, planned)
    return sentences + _heads_advice(subject, planned)


def _ring_advice(subject: Subject, planned: Plan) -> list[str]:
    """Return what layers with a window save, or would save, by keeping no more than that."""
    layers, now = subject.sizes.cache_layers, planned.cache_bytes
    rings = [layer for layer in layers if layer.capacity is not None]
    if rings:
        whole = _cache_bytes(_with_rings(layers, lambda layer: None), planned)
        if whole == now:
            return []
        return [
            f"rings help already: {len(rings)} of {len(layers)} layers keep the tokens of their "
            f"window only, or the cache would be {_size(whole)}"
        ]
    limit = subject.max_sequence_length
    with_rings = _with_rings(layers, lambda layer: ring_capacity(layer.window_size, limit))
    ring_bytes = _cache_bytes(with_rings, planned)
    if ring_bytes == now:
        return []
    windowed = sum(layer.window_size is not None for layer in layers)
    return [
        f"rings: {windowed} of {len(layers)} layers see a window only; exported with --attention "
        f"flash and without --no-ring they keep little more than that, and the cache is "
        f"{_size(ring_bytes)} instead of {_size(now)}"
    ]


def _with_rings(
    layers: Sequence[CacheLayer], capacity_of: Callable[[CacheLayer], int | None]
) -> list[CacheLayer]:
    return [dataclasses.replace(layer, capacity=capacity_of(layer)) for layer in layers]


def _heads_advice(subject: Subject, planned: Plan) -> list[str]:
    """Return what heads have to do with it: MHA, GQA and MQA of the same shape."""
    run, layers = subject.sizes.run, subject.sizes.cache_layers
    kv_heads = layers[0].num_key_value_heads
    if run is None or any(layer.num_key_value_heads != kv_heads for layer in layers):
        return []
    # A latent layer has one wide head for all; it is no model with fewer heads.
    if any(layer.key_head_dim != layer.value_head_dim for layer in layers):
        return []
    heads, now = run.num_attention_heads, planned.cache_bytes
    if kv_heads == heads > 1:
        group = 8 if heads % 8 == 0 and heads > 8 else heads
        kind = "GQA" if group < heads else "MQA"
        return [
            f"a model with {kind}: all {heads} heads have keys and values of their own; with one "
            f"for {group} query heads the cache would be {_size(now // group)}"
        ]
    if kv_heads > 1:
        return [
            f"GQA helps already: {heads} query heads share {kv_heads} of keys and values, or the "
            f"cache would be {_size(now * heads // kv_heads)}; MQA would make it "
            f"{_size(now // kv_heads)}"
        ]
    return []


def _flash_advice(subject: Subject, planned: Plan) -> list[str]:
    """Return from which context the scores outgrow all else that a run holds."""
    run = subject.sizes.run
    if run is None:
        return []
    scores = score_bytes(run, planned.run_tokens, planned.context)
    if subject.sizes.attention != "flash":
        if SCORES_COPIES * scores < _DOMINANT * planned.workspace:
            return []
        return [
            f"export with --attention flash: scores of {_size(scores)}, and their softmax, are "
            f"most of the workspace, and Flash Attention never writes them"
        ]
    from_context = -(-planned.workspace // score_bytes(run, planned.run_tokens, 1))
    if planned.context < from_context:
        return []
    return [
        f"keep --attention flash (the default), which pays from {from_context} tokens on: there "
        f"the scores that others write outgrow all other workspace; here they would be "
        f"{_size(scores)}"
    ]


def _cache_bytes(layers: Sequence[CacheLayer], planned: Plan) -> int:
    return kv_cache_bytes(
        layers, batch_size=planned.batch_size, max_sequence_length=planned.context
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
