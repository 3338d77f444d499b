"""Rewriting: a traced graph becomes one that ONNX Runtime runs fast, or runs at all.

A rule is one module with `apply(editor) -> Outcome`, and inside it a pattern (what it looks for),
a check (is it safe) and a rewrite (what replaces it). A match that fails its check is a `Refusal`,
a sentence and a node, and stays as it was. Rules know nothing of each other; this module alone
knows their order. Running the list twice changes nothing.

The flash flavour, in order, and why:

1. `tidy`                 Merges repeated work: later rules meet each mask, cos and sin once.
2. `norm`                 Norms become one node. Before `heads`: it moves them out of its way.
3. `past_length`          Before masks are evaluated: afterwards they depend on attention_mask,
                          position_ids and the shape of input_ids only, which probes can supply.
4. `eager`                MatMul-Softmax-MatMul -> placeholder, where a model computes attention by
                          itself. After `past_length`: shapes around it read the cache. Layers
                          share the masks that it makes, so `tidy` follows it.
5. `flash`                Placeholder -> FlashAttention in its most general form (mask as bias,
                          rotation outside, heads moved by Transpose): right, not yet fast.
6. `mask`                 Bias -> causal, window_size and attention_mask.
7. `rotary`               Rotation into the op. Before `heads`, whose way it blocks.
8. `heads`                Transposes and Reshapes around the op disappear.
9. `scale`                A constant factor of the query goes into the op's scale.
10. `ring`                Windowed caches keep their newest tokens only. After `mask`.
11. `length_input`        For CUDA: past_sequence_length is an input. After `ring`.
12. `head_norm`           Norms of query and key heads -> HeadRMSNormalization. After `heads`.
13. `balance_heads`       For quantised caches: those norms' weights. After `head_norm`.
14. `packed_qkv`          The op reads a packed projection. Last of those that look at operands.
15. `stored_cache`        Keys and values get the type that they are stored in, and scales.
16. `gated`               act(gate) * up -> GatedActivation.
17. `skip_norm`           Residual Add and norm -> one node. After `norm`.
18. `num_logits_to_keep`  Slice in front of the LM head.
19. `float32_logits`      After the Slice, so that only kept logits are cast.
20. `tidy`                Again, over what the rules left behind.
21. `cache_use`           A check: nothing but the op may look at the cache.
22. `host_nodes`          A check, for CUDA: whether steps can be captured as a CUDA graph.
23. `calls`               A check: masks are causal, and say what the attention calls said.

The gqa flavour has `gqa` (ONNX Runtime's GroupQueryAttention) after 9, and none of 10 to 13 and 15
to 17. The standard flavour replaces 5 to 17 by `standard` (ONNX Attention or decomposed operators),
and has no use for 21. Graphs for CUDA do without `CPU_RULES`, whose operators have no CUDA kernels.

The graph's large constants lie in the weights file and are never loaded: rules pass them on, and
evaluation refuses to reach them. Graphs are read and written by `io`.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite import (
    balance_heads,
    cache_use,
    calls,
    eager,
    flash,
    float32_logits,
    gated,
    gqa,
    head_norm,
    heads,
    host_nodes,
    length_input,
    mask,
    norm,
    num_logits,
    packed_qkv,
    past_length,
    ring,
    rotary,
    scale,
    skip_norm,
    standard,
    stored_cache,
    tidy,
)
from kvconv.converter.rewrite.graph import Editor, Outcome, Refusal, find
from kvconv.converter.rewrite.io import read_graph, restore_overridable, write_graph
from kvconv.errors import RewriteError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import AttentionFlavour, CacheDtype, Provider

__all__ = [
    "OPTIONAL_RULES",
    "Refusal",
    "RewriteReport",
    "read_graph",
    "restore_overridable",
    "rewrite",
    "write_graph",
]


class Rule(Protocol):
    """What a rule's module offers."""

    NAME: str

    def apply(self, editor: Editor) -> Outcome:
        """Rewrite every match, in place."""


_BEFORE: tuple[Rule, ...] = (tidy, norm, past_length, eager)
_AFTER: tuple[Rule, ...] = (num_logits, float32_logits, tidy)
_FLASH: tuple[Rule, ...] = (flash, mask, rotary, heads, scale)
_RULES: dict[AttentionFlavour, tuple[Rule, ...]] = {
    "flash": (
        *(
            *_BEFORE,
            *_FLASH,
            ring,
            length_input,
            head_norm,
            balance_heads,
            packed_qkv,
            stored_cache,
        ),
        *(gated, skip_norm, *_AFTER),
    ),
    "gqa": (*_BEFORE, *_FLASH, gqa, packed_qkv, *_AFTER),
    "standard": (*_BEFORE, standard, *_AFTER),
}
_PLACEHOLDER = (names.TRACE_ATTENTION, names.TRACE_DOMAIN)
_MUST_REWRITE = {
    flash.NAME: _PLACEHOLDER,
    standard.NAME: _PLACEHOLDER,
    gqa.NAME: (names.OP_NAME, names.OP_DOMAIN),
}
"""Rules that must rewrite every attention -> operator and domain of what they rewrite."""
OPTIONAL_RULES = frozenset(
    rule.NAME
    for rule in (
        norm,
        mask,
        rotary,
        heads,
        scale,
        ring,
        head_norm,
        balance_heads,
        packed_qkv,
        gated,
        skip_norm,
    )
)
"""Rules that make a graph fast or its cache more exact, without which it computes the same."""

CPU_RULES = frozenset(rule.NAME for rule in (head_norm, balance_heads, gated, skip_norm))
"""Optional rules that write operators of kvconv's which have no CUDA kernel, or serve those."""


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """What rewriting did.

    Attributes:
        counts: Rule name -> times it fired, in the order of the rules.
        refusals: What rules left alone, and why.
        windows: Per layer, the tokens a query sees, its own included; None for all. Where a mask
            stays a bias, what the attention call said.
        ring_capacities: Per layer, the slots of its ring; None where it is none.
    """

    counts: dict[str, int]
    refusals: tuple[Refusal, ...]
    windows: tuple[int | None, ...]
    ring_capacities: tuple[int | None, ...]


def rewrite(
    graph: gs.Graph,
    *,
    attention: AttentionFlavour,
    opset: int,
    max_sequence_length: int | None = None,
    cache_dtype: CacheDtype | None = None,
    provider: Provider = "cpu",
    without: Collection[str] = (),
) -> RewriteReport:
    """Rewrite a traced graph in place.

    Args:
        graph: As traced, with `kvconv.trace::Attention` placeholders or eager attention; may have
            been rewritten already, which changes nothing.
        attention: Flavour of the attention nodes.
        opset: Version of the default ONNX domain that the graph uses.
        max_sequence_length: Most tokens a cache will hold; without it no cache becomes a ring,
            and the gqa flavour leaves rotation outside its nodes.
        cache_dtype: How keys and values are stored; None for the activations' type. Flash only.
        provider: What the graph is for. Flash only.
        without: Names of optional rules to leave out, which shows what each is worth.

    Raises:
        RewriteError: The graph has no cache, a layer's attention could not be rewritten, something
            besides the op reads the cache, or a mask is not causal.
        ValueError: The graph is of another opset, or `without` names another rule.
    """
    if not OPTIONAL_RULES.issuperset(without):
        raise ValueError(f"without is {set(without)}; it may hold {sorted(OPTIONAL_RULES)}")
    if graph.opset != opset:
        raise ValueError(f"the graph is of opset {graph.opset}, not {opset}")
    if provider == "cuda":
        without = CPU_RULES.union(without)
    editor = Editor(
        graph,
        max_sequence_length=max_sequence_length,
        cache_dtype=cache_dtype,
        provider=provider,
    )
    is_done = num_logits.is_done(graph)
    num_layers = 0 if is_done else _count_layers(graph)
    if not num_layers and not is_done:
        raise RewriteError(
            f"The graph has no input {names.past_key(0)}, so there is no attention to rewrite. "
            f"Trace the model with kvconv."
        )
    counts: dict[str, int] = {}
    refusals: list[Refusal] = []
    said: calls.Calls = {}
    placeholders: list[gs.Node] = []
    masks: calls.Masks = {}
    for rule in _RULES[attention]:
        if rule.NAME == eager.NAME and not num_layers:
            continue  # attention that `standard` decomposed would look eager again
        if rule.NAME == standard.NAME:
            masks = calls.evaluate_masks(graph, placeholders)  # while there are masks to ask
        target = _MUST_REWRITE.get(rule.NAME)
        expected = len(find(graph, *target)) if target else 0
        outcome = Outcome(0) if rule.NAME in without else rule.apply(editor)
        if rule.NAME == heads.NAME:
            masks = calls.read_masks(graph)  # before another flavour's nodes take over
        counts[rule.NAME] = counts.get(rule.NAME, 0) + outcome.count
        refusals += outcome.refusals
        if rule.NAME == eager.NAME:
            if outcome.count:
                counts[tidy.NAME] += tidy.apply(editor).count  # layers share the masks it made
            placeholders = find(graph, *_PLACEHOLDER)
            said = calls.said(placeholders)
            if len(placeholders) < num_layers:
                raise _error(attention, num_layers, len(placeholders), outcome.refusals)
        if outcome.count < expected:
            raise _error(attention, expected, outcome.count, outcome.refusals)
    if FLAVOURS[attention].shared_buffer and (stray := cache_use.check(graph)):
        raise _error(attention, len(placeholders), len(placeholders), stray)
    if provider == "cuda" and (readers := length_input.check(graph)):
        raise RewriteError(
            f"The model cannot run on CUDA with a cache in place: {readers[0]}. Export it for the "
            f"CPU, without --provider cuda.",
            expected=0,
            found=len(readers),
            refusals=[str(refusal) for refusal in readers],
        )
    if provider == "cuda":
        refusals += host_nodes.check(graph)
    _require_causal(masks)
    windows, differences = calls.check(said, masks)
    capacities = ring.read_capacities(graph)
    return RewriteReport(
        counts,
        (*refusals, *differences),
        windows,
        tuple(capacities.get(names.past_key(layer)) for layer in range(len(windows))),
    )


def _require_causal(masks: calls.Masks) -> None:
    ahead = [layer for layer, mask in sorted(masks.items()) if mask and not mask.causal]
    if ahead:
        raise RewriteError(
            f"The mask of layer {ahead[0]} lets tokens see later ones, so what is cached for a "
            f"token would change with each token after it. kvconv converts decoders whose "
            f"attention is causal.",
            expected=len(masks),
            found=len(masks) - len(ahead),
        )


def _count_layers(graph: gs.Graph) -> int:
    inputs = {tensor.name for tensor in graph.inputs}
    return next(layer for layer in itertools.count() if names.past_key(layer) not in inputs)


def _error(
    attention: AttentionFlavour, expected: int, found: int, refusals: tuple[Refusal, ...]
) -> RewriteError:
    remedy = (
        "Use --attention flash."
        if attention == "gqa"
        else "Please report this model; another --attention may work."
    )
    return RewriteError(
        f"{found} of {expected} attention nodes could be rewritten, but {refusals[0]}. {remedy}",
        expected=expected,
        found=found,
        refusals=[str(refusal) for refusal in refusals],
    )
