"""Check `calls`: what each attention call says of causality and window against what its mask says.

The mask is what Hugging Face computes with, so it counts, and a difference is reported. Where the
mask could not be put into words, the call's window is the best that is known.
"""

from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.graph import Refusal, find, get_operand
from kvconv.converter.rewrite.mask import LONG_PAST, Visibility, recognise

NAME = "calls"
_PAST_KEY = names.FLASH_ATTENTION_INPUTS.index("past_key")

Calls = Mapping[int, Visibility]
"""Layer index -> what the layer's attention call said; nothing where no call was traced."""
Masks = Mapping[int, Visibility | None]
"""Layer index -> what the layer's mask says; None where it cannot be said with attributes."""


def said(placeholders: Sequence[gs.Node]) -> Calls:
    """Return what each layer's attention call said, by layer index."""
    return {
        node.attrs["layer_index"]: Visibility(
            causal=bool(node.attrs["is_causal"]),
            window_size=_window(node.attrs["window_size"]),
        )
        for node in placeholders
        if "is_causal" in node.attrs  # rule `eager` knows of no call
    }


def evaluate_masks(graph: gs.Graph, placeholders: Sequence[gs.Node]) -> Masks:
    """Return what the masks of placeholders say, evaluating each distinct one once."""
    answers: dict[str, Visibility | None] = {}
    masks = {}
    for node in placeholders:
        mask = node.inputs[3]
        if mask.name not in answers:
            answer = recognise(graph, mask)
            answers[mask.name] = None if isinstance(answer, str) else answer
        masks[node.attrs["layer_index"]] = answers[mask.name]
    return masks


def read_masks(graph: gs.Graph) -> Masks:
    """Return what the masks of FlashAttention nodes say, from their attributes."""
    nodes = {
        node.inputs[_PAST_KEY].name: node for node in find(graph, names.OP_NAME, names.OP_DOMAIN)
    }
    return {
        layer: None
        if get_operand(node, "attention_bias") is not None
        else Visibility(bool(node.attrs["causal"]), node.attrs["window_size"] or None)
        for layer, node in ((i, nodes[names.past_key(i)]) for i in range(len(nodes)))
    }


def check(calls: Calls, masks: Masks) -> tuple[tuple[int | None, ...], tuple[Refusal, ...]]:
    """Return each layer's window, and one refusal per call that says other than its mask."""
    windows = []
    refusals = []
    for layer, mask in sorted(masks.items()):
        call = calls.get(layer)  # none in a graph that was rewritten before
        known = call if mask is None else mask
        windows.append(None if known is None else known.window_size)
        if call is not None and mask is not None and _words(call) != _words(mask):
            reason = (
                f"its attention call says {_words(call)}, its mask {_words(mask)}, which counts"
            )
            refusals.append(Refusal(NAME, f"layer {layer}", reason))
    return tuple(windows), tuple(refusals)


def _window(size: int) -> int | None:
    """Return a window as evaluation would find it: none if no probe is long enough to cross it."""
    return size if 0 < size <= LONG_PAST else None


def _words(visibility: Visibility) -> str:
    window = visibility.window_size
    causal = "causal" if visibility.causal else "not causal"
    return f"{causal} and {'no window' if window is None else f'window {window}'}"
