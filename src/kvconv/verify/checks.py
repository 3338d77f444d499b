"""The runtime's side: drives a bundle through the checks, without PyTorch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvconv.flavour import FLAVOURS
from kvconv.manifest import FLOAT_CACHE, FLOAT_WEIGHTS, RING_SLACK, Manifest, Verification
from kvconv.verify.logits import FLOAT_CACHES, Limits, compare_logits
from kvconv.verify.reference import MAX_LOGITS, Continuation, FloatArray, Reference

if TYPE_CHECKING:
    from kvconv.runtime import KVCache, Session

_MAX_WHOLE_LOGITS = 2**25
"""Most logits, tokens x vocab_size, that the whole prefill returns for every token: 134 MB."""
_CHUNKS = (1, 3, 17, 64, 31, 128, 257)
_PADDED_CHUNK = 96
_BATCH_STEPS = 4


def run_checks(session: "Session", manifest: Manifest, reference: Reference) -> Verification:
    """Run the checks of this package's list that the attention flavour takes; name the others."""
    length = len(reference.prompt.input_ids)
    cache = session.new_cache(1, len(reference.decoded.input_ids))
    checks = []
    limits: Limits

    def check(name: str, found: FloatArray, wanted: FloatArray) -> None:
        checks.append(compare_logits(name, found, wanted, limits))

    # 0. What the bundle alone has rounded, loosely: weights against PyTorch with float ones, the
    # cache against PyTorch with the same weights. The other checks are against PyTorch with the
    # same weights, or, where it has not those or that cache, the bundle against itself.
    float_logits, spread = reference.float_logits, reference.spread
    has_weights = manifest.quantization is None or float_logits is not None
    float_cache = FLOAT_CACHES.get(manifest.cache_layers[0].dtype)
    is_same = has_weights and float_cache is None
    if manifest.quantization is not None or float_cache is not None:
        found = _chunked(session, cache, reference.prompt)
        cache.reset()
        if manifest.quantization is not None:
            limits = Limits.of(manifest.weights_dtype, spread)
            if float_cache is not None:
                limits = limits.at_least(Limits.of(float_cache, spread))
            wanted = reference.prompt.logits if float_logits is None else float_logits
            check(FLOAT_WEIGHTS, found, wanted)
        if has_weights and float_cache is not None:
            limits = Limits.of(float_cache, spread)
            check(FLOAT_CACHE, found, reference.prompt.logits)
        if not is_same:
            reference = _own_reference(session, reference, found)
    limits = Limits.of_bundle(manifest, reference.spread)
    prompt, decoded = reference.prompt, reference.decoded

    # 1. whole prefill, and 3. decode behind it
    check("whole prefill", *_whole(session, cache, prompt))
    steps = [session.run(cache, _row([token]))[0] for token in decoded.input_ids[length:]]
    check(f"decode, {len(steps)} steps", np.concatenate(steps), decoded.logits)

    # 5. rewind and re-prompt, on the same cache
    again = reference.reprompted
    if length // 2 < cache.shortest_rewind:  # rings: fewer tokens, which they can take back
        cache.reset()
        known = length // 2 + cache.most_new_tokens - 1
        _run(session, cache, prompt.input_ids[:known], num_logits_to_keep=1)
    cache.rewind(length // 2)
    tail = again.input_ids[length // 2 :]
    found = _run(session, cache, tail, num_logits_to_keep=len(again.positions))
    check("rewind and re-prompt", found, again.logits)

    # 2. chunked prefill
    if is_same:  # otherwise the prompt's logits come from chunks already
        cache.reset()
        check("chunked prefill", _chunked(session, cache, prompt), prompt.logits)

    # 4. left-padded batch, or one of equal lengths
    flavour, not_checked = FLAVOURS[manifest.attention], reference.not_checked
    if not flavour.padding:
        check("equal-length batch", *_equal_batch(session, prompt, again))
        not_checked += (f"left-padded batch: the {manifest.attention} flavour takes no padding",)
    elif reference.rows:
        check(
            "left-padded batch",
            *_padded_batch(session, reference.rows, pad_id=manifest.pad_token_id or 0),
        )
    if ring := max((layer.capacity or 0 for layer in manifest.cache_layers), default=0):
        if ring >= len(decoded.input_ids):
            not_checked += (
                f"rings: {len(decoded.input_ids)} tokens do not fill one of {ring} slots; kvconv "
                f"verify --prompt-tokens {ring + RING_SLACK} does",
            )
    if not flavour.batched_chunks:
        not_checked += (f"chunks of a batch: the {manifest.attention} flavour takes none",)

    if manifest.kernels is not None and session.provider == "cpu":
        not_checked += ("CUDA kernels: the bundle was run on the CPU",)

    return Verification(
        status="passed" if all(result.passed for result in checks) else "failed",
        tolerance=limits.max_abs,
        checks=tuple(checks),
        not_checked=not_checked,
    )


def _own_reference(session: "Session", reference: Reference, prompt: FloatArray) -> Reference:
    """Return a reference with the bundle's own logits, of one run from an empty cache each.

    Args:
        session: The bundle.
        reference: PyTorch's.
        prompt: The bundle's logits of the prompt, from a chunked prefill, which gives them all.
    """

    def run(part: Continuation) -> Continuation:
        cache, first = session.new_cache(1, len(part.input_ids)), part.positions[0]
        kept = len(part.input_ids) - first
        logits = _run(session, cache, part.input_ids, num_logits_to_keep=kept)
        return replace(part, logits=logits[np.array(part.positions) - first])

    return replace(
        reference,
        prompt=replace(reference.prompt, logits=prompt),
        decoded=run(reference.decoded),
        rows=tuple(map(run, reference.rows)),
        reprompted=run(reference.reprompted),
    )


def _whole(
    session: "Session", cache: "KVCache", prompt: Continuation
) -> tuple[FloatArray, FloatArray]:
    """Prefill in one run, or in few where rings take no more; return found and wanted logits.

    A graph gives the logits of the last tokens only. Where those of all tokens are too many, the
    positions before them are left to the chunked prefill.
    """
    length, vocab_size = len(prompt.input_ids), prompt.logits.shape[-1]
    fits = length * vocab_size <= _MAX_WHOLE_LOGITS
    kept = length if fits else min(length, max(1, MAX_LOGITS // vocab_size))
    first = next(i for i, position in enumerate(prompt.positions) if position >= length - kept)
    logits = _run(session, cache, prompt.input_ids, num_logits_to_keep=kept)
    rows = np.array(prompt.positions[first:]) - (length - kept)
    return logits[rows], prompt.logits[first:]


def _chunked(session: "Session", cache: "KVCache", prompt: Continuation) -> FloatArray:
    """Prefill in runs of odd sizes; return the logits at the prompt's positions.

    A chunk ends early where the logits between its first position and its end would be too many.
    """
    most = max(1, MAX_LOGITS // prompt.logits.shape[-1])
    positions = np.array(prompt.positions)
    pieces, start, turn = [], 0, 0
    while start < len(prompt.input_ids):
        end = min(start + _CHUNKS[turn % len(_CHUNKS)], len(prompt.input_ids))
        first = int(positions[positions >= start][0])
        end = min(end, first + most)
        kept = max(1, end - first)
        chunk = _row(prompt.input_ids[start:end])
        logits = session.run(cache, chunk, num_logits_to_keep=kept)[0]
        pieces.append(logits[positions[(positions >= first) & (positions < end)] - first])
        start, turn = end, turn + 1
    return np.concatenate(pieces)


def _run(
    session: "Session", cache: "KVCache", input_ids: list[int], *, num_logits_to_keep: int
) -> FloatArray:
    """Run tokens in the largest pieces that the cache takes, most often one.

    Returns:
        [num_logits_to_keep, vocab_size] float32.
    """
    length, first = len(input_ids), len(input_ids) - num_logits_to_keep
    pieces = []
    for start in range(0, length, cache.most_new_tokens):
        end = min(start + cache.most_new_tokens, length)
        kept = end - max(start, first)
        piece = _row(input_ids[start:end])
        logits = session.run(cache, piece, num_logits_to_keep=max(1, kept))[0]
        pieces.append(logits[: max(0, kept)])
    return np.concatenate(pieces)


def _padded_batch(
    session: "Session", rows: Sequence[Continuation], pad_id: int
) -> tuple[FloatArray, FloatArray]:
    """Run rows as one left-padded batch; return found and wanted logits, rows stacked."""
    steps = len(rows[0].logits) - 1
    prompts = [row.input_ids[:-steps] for row in rows]
    width = max(map(len, prompts))
    cache = session.new_cache(len(rows), width + steps)
    mask = np.ones((len(rows), width + steps), np.int64)
    input_ids = np.full((len(rows), width), pad_id, np.int64)
    for index, prompt in enumerate(prompts):
        mask[index, : width - len(prompt)] = 0
        input_ids[index, width - len(prompt) :] = prompt
    for start in range(0, width, _PADDED_CHUNK):
        chunk = input_ids[:, start : start + _PADDED_CHUNK]
        last = session.run(cache, chunk, attention_mask=mask[:, : start + chunk.shape[1]])
    runs = [last]
    for step in range(steps):
        tokens = np.array([[row.input_ids[step - steps]] for row in rows], np.int64)
        runs.append(session.run(cache, tokens, attention_mask=mask[:, : width + step + 1]))
    return np.concatenate(np.concatenate(runs, axis=1)), np.concatenate([r.logits for r in rows])


def _equal_batch(
    session: "Session", prompt: Continuation, other: Continuation
) -> tuple[FloatArray, FloatArray]:
    """Run two sequences as one batch, the first cut to the other's length; the last tokens singly.

    Returns:
        Found and wanted logits of both sequences, at those of the other's positions that are known.
    """
    length, first = len(other.input_ids), other.positions[0]
    steps = min(_BATCH_STEPS, length - 1)
    input_ids = np.array([prompt.input_ids[:length], other.input_ids], np.int64)
    cache = session.new_cache(2, length)
    whole, kept = input_ids[:, : length - steps], length - steps - first
    runs = [session.run(cache, whole, num_logits_to_keep=max(1, kept))]
    runs += [session.run(cache, input_ids[:, i : i + 1]) for i in range(length - steps, length)]
    logits = np.concatenate(runs, axis=1)
    start = length - logits.shape[1]
    found, wanted = [], []
    for row, sequence in zip(logits, (prompt, other), strict=True):
        known = [i for i, at in enumerate(sequence.positions) if start <= at < length]
        found.append(row[[sequence.positions[i] - start for i in known]])
        wanted.append(sequence.logits[known])
    return np.concatenate(found), np.concatenate(wanted)


def _row(input_ids: list[int]) -> npt.NDArray[np.int64]:
    return np.array([input_ids], np.int64)
