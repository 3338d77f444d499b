"""Rule `mask`: an attention_bias that only says causal, window and padding becomes attributes.

The bias is evaluated, not matched: its subgraph runs on probes (several past and new lengths; no
padding, left and right padding, holes; lengths crossing the window) and must say exactly

    slot j is seen by query i  <=>  j <= past + i  and  j > past + i - window_size  and  mask[b, j]

and add nothing to the scores of what is seen, or slope * j (ALiBi; softmax does not mind what else
is added to a whole row). A row in which nothing may be seen is a padding query; nobody reads its
result, so there any value will do. Without an exact match the bias stays, which is always right.

ALiBi may count attended slots only (BLOOM). The op counts all, which is the same for padding on
either side; that it differs behind holes is reported.

A bias that reads token ids or position ids stays too, unevaluated: a caller may pass any (packed
sequences restart their positions), so agreeing on the ids that a mask implies proves nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.converter.rewrite.evaluate import Array, Cut, NotEvaluableError, Probe, make_probe
from kvconv.converter.rewrite.graph import (
    Editor,
    Outcome,
    Refusal,
    find,
    get_operand,
    producer,
    set_operand,
)

NAME = "mask"
_ADDS = "it adds numbers to the scores of slots that are seen"
_HOLES = (
    "holes in attention_mask are left alone: the model's ALiBi counts attended slots, the op's "
    "counts all, which differ only behind a hole"
)
LONG_PAST = 2**20 + 2
"""Past length of the probe that finds a window; longer than the windows in use."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a mask says.

    Attributes:
        causal: Whether a query sees no later slot.
        window_size: Slots a query sees, its own included; None for all.
        slopes: What a slot adds to the score per slot before it, per head or for all; None for 0.
        counts_attended: Whether only attended slots count as slots before it.
    """

    causal: bool
    window_size: int | None = None
    slopes: tuple[float, ...] | None = None
    counts_attended: bool = False

    def seen(self, probe: Probe) -> Array:
        """Return [batch_size, sequence_length, total_sequence_length] bool."""
        total = probe.attention_mask.shape[1]
        query_slot = np.arange(probe.past, total)[:, None]
        slot = np.arange(total)
        seen = np.broadcast_to(slot <= query_slot, (total - probe.past, total))
        if not self.causal:
            seen = np.ones_like(seen)
        if self.window_size is not None:
            seen = seen & (slot > query_slot - self.window_size)
        return seen & (probe.attention_mask != 0)[:, None]

    def added(self, probe: Probe) -> Array:
        """Return [batch_size or 1, num_attention_heads or 1, 1, total_sequence_length] float64."""
        slots = np.arange(probe.attention_mask.shape[1])[None]
        if self.counts_attended:
            slots = probe.attention_mask.cumsum(1) - 1
        added: Array = np.reshape(self.slopes or 0.0, (1, -1, 1, 1)) * slots[:, None, None]
        return added


def apply(editor: Editor) -> Outcome:
    """Recognise the bias of every FlashAttention node, evaluating each distinct one once."""
    said: dict[str, Visibility | str] = {}
    refusals = []
    count = 0
    for node in find(editor.graph, names.OP_NAME, names.OP_DOMAIN):
        bias = _pattern(node)
        if bias is None:
            continue
        if bias.name not in said:
            said[bias.name] = answer = recognise(editor.graph, bias)
            if isinstance(answer, Visibility) and answer.counts_attended:
                refusals.append(Refusal(NAME, node.name, _HOLES))
        answer = _check(node, said[bias.name])
        if isinstance(answer, str):
            refusals.append(Refusal(NAME, node.name, f"{bias.name} stays a bias: {answer}"))
        else:
            _rewrite(editor, node, answer)
            count += 1
    return Outcome(count, tuple(refusals))


def _pattern(node: gs.Node) -> gs.Tensor | None:
    return None if node.attrs["causal"] else get_operand(node, "attention_bias")


def _check(node: gs.Node, said: Visibility | str) -> Visibility | str:
    """Return what a mask says if this node may say it with attributes, or why not."""
    if isinstance(said, str) or said.slopes is None:
        return said
    if get_operand(node, "head_sink") is not None:
        return "with a head sink it matters what is added to a whole row"
    return said


def _rewrite(editor: Editor, node: gs.Node, visibility: Visibility) -> None:
    set_operand(node, "attention_mask", editor.input(names.ATTENTION_MASK))
    set_operand(node, "attention_bias", None)
    if visibility.slopes is not None:
        slopes = np.broadcast_to(visibility.slopes, node.attrs["num_heads"])
        set_operand(node, "alibi_slopes", editor.constant(slopes.astype(np.float32)))
    node.attrs["causal"] = int(visibility.causal)
    node.attrs["window_size"] = visibility.window_size or 0


def recognise(graph: gs.Graph, mask: gs.Tensor) -> Visibility | str:
    """Return what a mask says, or why it cannot be said with attributes.

    Args:
        graph: Where the mask lives.
        mask: [batch_size or 1, num_attention_heads or 1, sequence_length,
            total_sequence_length] bool (True = attend) or float (added to the scores).
    """
    above = producer(mask)
    if above is not None and above.op == "Cast":
        if (above.inputs[0].dtype, mask.dtype) == (np.float32, np.float16):
            mask = above.inputs[0]  # MPT's ALiBi, float32 in float16 models too, which round it
    try:
        cut = Cut(graph, [mask], positions=False)
        visibility = _guess(cut)
        if isinstance(visibility, str):
            return visibility
        difference = _first_difference(cut, visibility)
        if difference is not None and visibility.slopes is not None:
            counting = replace(visibility, counts_attended=True)
            if _first_difference(cut, counting) is None:
                return counting
    except NotEvaluableError as error:
        return str(error)
    return visibility if difference is None else difference


def _first_difference(cut: Cut, visibility: Visibility) -> str | None:
    """Return where a mask departs from what it is taken to say, on any probe, or None."""
    differences = (_compare(cut, probe, visibility) for probe in _probes(visibility.window_size))
    return next((difference for difference in differences if difference is not None), None)


def _guess(cut: Cut) -> Visibility | str:
    """Read causality, slopes and window off two probes; the probes proper then judge."""
    short = _read(cut, make_probe(np.ones((1, 2), np.int64), 2))
    long = _read(cut, _long_probe())
    if isinstance(short, str) or isinstance(long, str):
        return short if isinstance(short, str) else str(long)
    if not np.isfinite(short.added).all():
        return _ADDS
    slopes = short.added[0, :, 1, 1] - short.added[0, :, 1, 0]
    slots = long.seen.sum(-1)
    if slots.min() != slots.max():
        return "its heads see different slots"
    return Visibility(
        causal=not short.seen[..., 0, 1].any(),
        window_size=int(slots.max()) if slots.max() <= LONG_PAST else None,
        slopes=tuple(slopes.tolist()) if slopes.any() else None,
    )


def _long_probe() -> Probe:
    return make_probe(np.ones((1, LONG_PAST + 1), np.int64), 1)


def _probes(window: int | None) -> Iterator[Probe]:
    lengths = [(0, 1), (0, 2), (0, 7), (1, 1), (5, 1), (5, 3), (11, 4)]
    if window is not None:
        around = [max(window + delta, 0) for delta in (-2, -1, 0, 1)]
        lengths += [(past, new) for past in around for new in (1, 4)] + [(2 * window + 1, 3)]
        lengths += [(0, window + 3)] if window <= 600 else []
    random = np.random.default_rng(0)
    for past, new in lengths:
        total = past + new
        mask = np.ones((6, total), np.int64)
        mask[1, : total // 3] = 0  # left padding
        mask[2, : total - 1] = 0  # left padding up to the last token
        mask[3, total - total // 3 :] = 0  # right padding
        mask[4, total // 3 : total // 2] = 0  # right padding, then new tokens: a hole
        mask[5] = random.integers(0, 2, total)
        yield make_probe(mask, new)
    yield _long_probe()


def _compare(cut: Cut, probe: Probe, visibility: Visibility) -> str | None:
    """Return where a mask departs from what it is taken to say, or None."""
    read = _read(cut, probe)
    if isinstance(read, str):
        return read
    expected = visibility.seen(probe)[:, None]
    try:
        seen, expected = np.broadcast_arrays(read.seen, expected)
    except ValueError:
        return f"its shape {read.seen.shape} does not fit {expected.shape}"
    wrong = (seen != expected) & expected.any(-1, keepdims=True)
    if wrong.any():
        batch, head, row, slot = (int(index) for index in np.argwhere(wrong)[0])
        return (
            f"with {probe.past} past and {expected.shape[2]} new tokens and attention_mask "
            f"{_abbreviate(probe.attention_mask[batch])}, new token {row} "
            f"{'sees' if seen[batch, head, row, slot] else 'does not see'} "
            f"slot {slot}, which {visibility} would not say"
        )
    # Whatever ALiBi adds to a row as a whole counts as nothing.
    excess = read.added - visibility.added(probe)
    known = expected & np.isfinite(read.added)  # float16 overflows where a slot is far enough
    nothing = np.where(known, excess, -np.inf).max(-1, keepdims=True)
    spread = np.abs(excess - nothing) if visibility.slopes else np.abs(excess)
    known |= expected & (visibility.slopes is None)
    largest = np.abs(read.added[np.isfinite(read.added)]).max(initial=0.0)
    if (np.where(known, spread, 0.0) > read.resolution * largest).any():
        return _ADDS
    return None


@dataclass(frozen=True, slots=True)
class _Read:
    """What a mask said on a probe.

    Attributes:
        seen: [batch_size or 1, heads or 1, sequence_length, total_sequence_length] bool.
        added: Same shape, float64; 0 where nothing is seen.
        resolution: Relative error of what is added.
    """

    seen: Array
    added: Array
    resolution: float = 0.0


def _read(cut: Cut, probe: Probe) -> _Read | str:
    """Evaluate a mask; returns why it is none if its shape is wrong."""
    (values,) = cut.run(probe.feeds())
    total = probe.attention_mask.shape[1]
    new = total - probe.past
    if values.ndim != 4 or values.shape[2] not in (1, new) or values.shape[3] not in (1, total):
        return f"its shape is {values.shape}, not [batch, heads, sequence, total]"
    values = np.broadcast_to(values, (*values.shape[:2], new, total))
    if values.dtype == bool:
        return _Read(values, np.broadcast_to(0.0, values.shape))
    numbers = np.finfo(values.dtype)
    seen = values > max(-1e9, float(numbers.min) / 2)  # float16's lowest, plus ALiBi, is masked too
    added = np.where(seen, values, 0).astype(np.float64)
    return _Read(seen, added, max(1e-6, float(numbers.eps)))


def _abbreviate(mask: Array) -> str:
    text = "".join(str(value) for value in mask)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-17:]}"
