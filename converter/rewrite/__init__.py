"""Rewriting: a traced graph becomes one that ONNX Runtime runs fast, or runs at all.

A rule is one module with `apply(editor) -> Outcome`, and inside it a pattern (what it looks for),
a check (is it safe) and a rewrite (what replaces it). A match that fails its check is a `Refusal`,
a sentence and a node, and stays as it was. Rules know nothing of each other; this module alone
knows their order. Running the list twice changes nothing.

The flash flavour, in order, and why:

1. `tidy`                 Merges repeated work, so that later rules meet each mask, cos and sin once.
2. `past_length`          Before masks are evaluated: afterwards they depend on attention_mask,
                          position_ids and the shape of input_ids only, which probes can supply.
3. `attention`            Placeholder -> FlashAttention in its most general form (mask as bias,
                          rotation outside, heads moved by Transpose): right, not yet fast.
4. `mask`                 Bias -> causal, window_size and attention_mask.
5. `rotary`               Rotation into the op. Before `heads`, whose way it blocks.
6. `heads`                Transposes and Reshapes around the op disappear.
7. `num_logits_to_keep`   Slice in front of the LM head.
8. `float32_logits`       After the Slice, so that only kept logits are cast.
9. `tidy`                 Again, over what the rules left behind.
10. `cache_use`           A check: nothing but the op may look at the cache.

The standard flavour replaces 3 to 6 by `standard` (ONNX Attention or decomposed operators).

The graph's large constants lie in the weights file and are never loaded: rules pass them on, and
evaluation refuses to reach them. Graphs are read and written by `io`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite import (
    attention,
    cache_use,
    float32_logits,
    heads,
    mask,
    num_logits,
    past_length,
    rotary,
    standard,
    tidy,
)
from kvconv.converter.rewrite.graph import Editor, Outcome, Refusal, find
from kvconv.converter.rewrite.io import read_graph, restore_overridable, write_graph
from kvconv.errors import RewriteError

__all__ = [
    "Refusal",
    "RewriteReport",
    "read_graph",
    "restore_overridable",
    "rewrite",
    "write_graph",
]

_Rule = tuple[str, Callable[[Editor], Outcome]]
_BEFORE: tuple[_Rule, ...] = ((tidy.NAME, tidy.apply), (past_length.NAME, past_length.apply))
_FLASH: tuple[_Rule, ...] = (
    (attention.NAME, attention.apply),
    (mask.NAME, mask.apply),
    (rotary.NAME, rotary.apply),
    (heads.NAME, heads.apply),
)
_STANDARD: tuple[_Rule, ...] = ((standard.NAME, standard.apply),)
_AFTER: tuple[_Rule, ...] = (
    (num_logits.NAME, num_logits.apply),
    (float32_logits.NAME, float32_logits.apply),
    (tidy.NAME, tidy.apply),
)
_DONE = ((names.OP_NAME, names.OP_DOMAIN), ("Attention", ""), ("Softmax", ""))


@dataclass(frozen=True, slots=True)
class RewriteReport:
    """What rewriting did.

    Attributes:
        counts: Rule name -> times it fired, in the order of the rules.
        refusals: What rules left alone, and why.
        windows: Per layer, the tokens a query sees, its own included; None for all.
    """

    counts: dict[str, int]
    refusals: tuple[Refusal, ...]
    windows: tuple[int | None, ...]


def rewrite(
    graph: gs.Graph, *, attention: Literal["flash", "standard"], opset: int
) -> RewriteReport:
    """Rewrite a traced graph in place.

    Args:
        graph: As traced, with `kvconv.trace::Attention` placeholders; may have been rewritten
            already, which changes nothing.
        attention: Flavour of the attention nodes.
        opset: Version of the default ONNX domain that the graph uses.

    Raises:
        RewriteError: A placeholder could not be rewritten, or something besides the op reads the
            cache.
    """
    graph.opset = opset
    editor = Editor(graph)
    counts: dict[str, int] = {}
    refusals: list[Refusal] = []
    placeholders = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
    expected = len(placeholders)
    windows = [node.attrs["window_size"] or None for node in placeholders]
    for name, apply in (*_BEFORE, *(_FLASH if attention == "flash" else _STANDARD), *_AFTER):
        outcome = apply(editor)
        counts[name] = counts.get(name, 0) + outcome.count
        refusals += outcome.refusals
        if name in (standard.NAME, "attention") and outcome.count < expected:
            raise _error(expected, outcome.count, outcome.refusals)
    return RewriteReport(counts, tuple(refusals), tuple(windows))


def _error(expected: int, found: int, refusals: tuple[Refusal, ...]) -> RewriteError:
    return RewriteError(
        f"{found} of {expected} attention nodes could be rewritten. {refusals[0]}.",
        expected=expected, found=found, refusals=[str(refusal) for refusal in refusals],
    )  # fmt: skip
