"""What a bundle's attention flavour does not take is refused before anything runs.

ONNX Runtime itself would compute nonsense for some of it without a word.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvconv.errors import FlavourError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import AttentionFlavour


def check_run(
    attention: AttentionFlavour,
    attention_mask: npt.NDArray[np.int64],
    position_ids: npt.NDArray[np.int64],
) -> None:
    """Refuse a run that the flavour does not take.

    Args:
        attention: The flavour.
        attention_mask: [batch_size, total_sequence_length] int64.
        position_ids: [batch_size, sequence_length] int64.

    Raises:
        FlavourError: The mask has a padded slot, the position ids are not the slots, or several new
            tokens follow a past at a batch size above 1.
    """
    (batch_size, new), total = position_ids.shape, attention_mask.shape[1]
    past = total - new
    if not FLAVOURS[attention].padding:
        padded = np.argwhere(attention_mask != 1)
        if len(padded) > 0:
            row, slot = padded[0]
            raise _refusal(
                attention,
                f"takes no padding and no holes, and attention_mask is {attention_mask[row, slot]} "
                f"in row {row}, slot {slot}",
            )
        moved = np.argwhere(position_ids != np.arange(past, total))
        if len(moved) > 0:
            row, token = moved[0]
            raise _refusal(
                attention,
                f"takes the cache slot as position, and position_ids is "
                f"{position_ids[row, token]} in row {row}, slot {past + token}",
            )
    if past > 0 and new > 1 and not FLAVOURS[attention].takes_chunks(batch_size):
        raise _refusal(
            attention,
            f"takes several new tokens behind a past at batch size 1 only, and here {new} follow "
            f"{past} at batch size {batch_size}",
        )


def check_chunks(
    attention: AttentionFlavour, batch_size: int, new_tokens: int, chunk_tokens: int
) -> None:
    """Refuse chunks that the flavour does not take.

    Args:
        attention: The flavour.
        batch_size: Rows that run together.
        new_tokens: Tokens per row that are to run.
        chunk_tokens: Most of them in one run, as the caller wants it.

    Raises:
        FlavourError: There would be several runs, and the flavour takes one.
    """
    if chunk_tokens < new_tokens and not FLAVOURS[attention].takes_chunks(batch_size):
        raise _refusal(
            attention,
            f"takes chunks of a prompt at batch size 1 only, and chunks of {chunk_tokens} would "
            f"cut {new_tokens} tokens at batch size {batch_size}",
            "run whole prompts (without --prefill-chunk), ",
        )


def check_prompts(attention: AttentionFlavour, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that would have to be padded.

    Raises:
        FlavourError: Their lengths differ, and the flavour takes no padding.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not FLAVOURS[attention].padding and len(set(lengths)) > 1:
        raise _refusal(
            attention,
            f"takes prompts of one length in a batch, and these have {min(lengths)} to "
            f"{max(lengths)} tokens",
        )


def _refusal(attention: AttentionFlavour, what: str, remedy: str = "") -> FlavourError:
    return FlavourError(
        f"The {attention} flavour of this bundle {what}. Run the sequences one by one, "
        f"unpadded (--batch-size 1), {remedy}or export the model with --attention flash.",
        attention=attention,
    )
