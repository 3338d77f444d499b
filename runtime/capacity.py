"""How many cache slots a generation needs, and whether its prompts fit."""

from collections.abc import Sequence

from kvconv.errors import CacheFullError, PromptError
from kvconv.runtime.sampling import SamplingParams

RowParams = SamplingParams | Sequence[SamplingParams]
"""The same for all rows, or one per row."""


def needed_capacity(
    prompts: Sequence[Sequence[int]],
    params: RowParams,
    max_sequence_length: int,
) -> int:
    """Return the slots per row that a generation needs and may have.

    Raises:
        PromptError: A prompt is empty.
        CacheFullError: The longest prompt leaves no room for a token.
    """
    longest = longest_prompt(prompts)
    most_new = max(row_params.max_new_tokens for row_params in per_row(params, len(prompts)))
    capacity = min(longest + most_new, max_sequence_length)
    check_fit(longest, capacity)
    return capacity


def per_row(params: RowParams, batch_size: int) -> Sequence[SamplingParams]:
    """Return one SamplingParams per row."""
    if isinstance(params, SamplingParams):
        return [params] * batch_size
    if len(params) != batch_size:
        raise ValueError(f"There are {len(params)} params for {batch_size} prompts")
    return params


def longest_prompt(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens of the longest prompt.

    Raises:
        PromptError: There is no prompt, or an empty one.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise PromptError("The prompt is empty: it has no tokens. Give some text to continue.")
    return max(len(prompt) for prompt in prompts)


def check_fit(longest: int, capacity: int) -> None:
    """Refuse prompts that leave no room for a new token.

    Raises:
        CacheFullError: The longest prompt fills the cache.
    """
    if longest >= capacity:
        raise CacheFullError(
            f"The prompt has {longest} tokens and one more must fit, but the cache holds "
            f"{capacity}. Raise --max-sequence-length (at most what the model was exported for), "
            f"or shorten the prompt.",
            needed=longest + 1,
            capacity=capacity,
        )
