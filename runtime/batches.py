"""Cutting a list of prompts into batches that cost little and change no result."""

from collections.abc import Sequence

from kvconv.runtime.sampling import SamplingParams

_WINDOW_BATCHES = 8
"""So many batches' prompts are sorted together: less padding, and yet the first results come soon
in the order of the prompts."""


def plan_batches(
    lengths: Sequence[int],
    params: Sequence[SamplingParams],
    *,
    batch_size: int,
    max_sequence_length: int,
) -> list[list[int]]:
    """Put prompts of like length into one batch.

    Padding takes cache slots from a row. Prompts that could then get fewer new tokens than alone
    do not share a batch, so `Generator.generate` gives each the tokens that it would get alone.

    Args:
        lengths: Tokens per prompt, each < max_sequence_length.
        params: One per prompt.
        batch_size: Most prompts in a batch, >= 1.
        max_sequence_length: Most tokens of a row, padding, prompt and new.

    Returns:
        The prompts' indices, each once, batch by batch; early prompts early.
    """
    window = batch_size * _WINDOW_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(lengths), window):
        indices = range(start, min(start + window, len(lengths)))
        window_batches: list[list[int]] = []
        batch: list[int] = []
        most_new = 0
        for i in sorted(indices, key=lengths.__getitem__):
            new = min(params[i].max_new_tokens, max_sequence_length - lengths[i])
            # Sorted: this prompt is the longest so far.
            fits = lengths[i] + max(most_new, new) <= max_sequence_length
            if not batch or not fits or len(batch) == batch_size:
                batch, most_new = [], 0
                window_batches.append(batch)
            batch.append(i)
            most_new = max(most_new, new)
        batches += sorted(window_batches, key=min)
    return batches
