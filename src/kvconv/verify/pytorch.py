"""PyTorch's side: runs the model on every sequence of the checks."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvconv.converter.quiet import quiet
from kvconv.errors import UnsupportedModelError
from kvconv.manifest import RING_SLACK
from kvconv.verify.reference import MAX_LOGITS, Continuation, Reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DECODE_STEPS = 16
BATCH_DECODE_STEPS = 4
PROMPT_TOKENS = 128
MAX_CROSSED_WINDOW = 1024
_MAX_PADDING_SHIFT = 0.02
"""Difference in parts of the logits' spread that rounding explains, in float16 too."""
_TEXT = (
    "The harbour was quiet before dawn. Two fishermen mended a net of 1,204 knots while the tide "
    "turned, and nobody spoke of the storm that had taken the old pier in 1987. “Is it far?” asked "
    "the girl. « Pas très loin », said the captain, и показал на север. 海の向こうに島が見えます。"
    "def distance(a, b): return abs(a - b) ** 0.5  # metres\nبعد ساعة عاد القارب. Dinner was rice, "
    "beans and a lemon; the bill came to €23.40. Later they counted the boats: one, two, three, "
    "five, eight, thirteen. Every answer led to a longer question, as it usually does at sea. 🙂 "
)


def make_reference(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    prompt_tokens: int | None,
    max_sequence_length: int,
) -> Reference:
    """Run PyTorch on every sequence of the checks; see `Verifier` for the arguments.

    Raises:
        UnsupportedModelError: PyTorch's own logits are not finite: the dtype is too narrow for the
            model, or its weights are broken.
    """
    config = model.config.get_text_config()
    length, steps, not_checked = _lengths(config, prompt_tokens, max_sequence_length)
    prompt = _prompt_ids(tokenizer, config.vocab_size, length)
    most = max(1, MAX_LOGITS // config.vocab_size)
    batch_steps = min(BATCH_DECODE_STEPS, steps)

    decoded = _greedy(model, prompt, steps)
    rows = [_greedy(model, prompt[-n:], batch_steps) for n in (length // 3 + 1, min(5, length))]
    rows.insert(0, _without_last(decoded, steps - batch_steps))
    if (shift := _padding_shift(model, rows, batch_steps)) is not None:
        rows = []
        not_checked = (*not_checked, shift)
    tail = prompt[: length // 4 + 1][::-1]
    reprompt = prompt[: length // 2] + tail
    last = range(len(reprompt) - min(most, len(tail)), len(reprompt))
    reference = Reference(
        prompt=_forward(model, prompt, _spread_positions(length, most)),
        decoded=Continuation(decoded.input_ids, decoded.positions[1:], decoded.logits[1:]),
        rows=tuple(rows),
        reprompted=_forward(model, reprompt, list(last)),
        not_checked=not_checked,
    )
    if not all(np.isfinite(part.logits).all() for part in reference.parts):
        dtype = str(model.dtype).removeprefix("torch.")
        remedy = "Try --dtype float32." if dtype != "float32" else "Its weights may be damaged."
        raise UnsupportedModelError(
            f"PyTorch's own logits of this {type(model).__name__} in {dtype} are not finite, so no "
            f"bundle of it can be right. {remedy}",
            model_type=config.model_type,
        )
    return reference


def _lengths(
    config: Any, prompt_tokens: int | None, limit: int
) -> tuple[int, int, tuple[str, ...]]:
    """Return the prompt's length, the decode steps, and what the prompt does not reach."""
    window = _largest_window(config)
    # Twice, and beyond where a ring wraps.
    crossing = window + max(window, RING_SLACK) + 90 if window is not None else 0
    length = prompt_tokens or PROMPT_TOKENS
    if prompt_tokens is None and window is not None and window <= MAX_CROSSED_WINDOW:
        length = max(length, crossing)
    steps = min(DECODE_STEPS, max(1, limit // 4))
    length = max(1, min(length, limit - steps))
    if window is None or length > window:
        return length, steps, ()
    sentence = (
        f"the prompt of {length} tokens does not cross the window or chunk of {window}; "
        f"kvconv verify --prompt-tokens {crossing} does, where the bundle holds so many"
    )
    return length, steps, (sentence,)


def _spread_positions(length: int, most: int) -> list[int]:
    """Return up to `most` positions: all, or three quarters spread evenly and the last quarter."""
    if length <= most:
        return list(range(length))
    last = most // 4
    spread = np.linspace(0, length - 1, most - last + 1)[1:].round().astype(int)
    return sorted({*spread.tolist(), *range(length - last, length)})


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, length: int
) -> list[int]:
    if tokenizer is None:
        random = np.random.default_rng(7)
        return [int(token) for token in random.integers(0, vocab_size, length)]
    ids: list[int] = []
    text = _TEXT
    while len(ids) < length:
        ids = [token for token in tokenizer(text)["input_ids"] if token < vocab_size]
        text += f"Chapter {len(text)}. {_TEXT}"
    return ids[:length]


def _largest_window(config: Any) -> int | None:
    """Return the tokens after which some layer forgets: a window, or a chunk (llama4)."""
    used = getattr(config, "use_sliding_window", True)
    sizes = [
        getattr(config, "sliding_window", None) if used else None,
        getattr(config, "attention_chunk_size", None),
        getattr(config, "window_size", None),  # gpt_neo
    ]
    return max((size for size in sizes if isinstance(size, int) and size), default=None)


def _forward(model: PreTrainedModel, input_ids: list[int], positions: list[int]) -> Continuation:
    """Run PyTorch once, without a cache."""
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters
    selected = {"logits_to_keep": torch.tensor(positions)} if selects else {}
    with quiet(), torch.inference_mode():
        logits = model(input_ids=torch.tensor([input_ids]), use_cache=False, **selected).logits[0]
    logits = logits if selects else logits[positions]
    return Continuation(input_ids, positions, logits.float().numpy())


def _greedy(model: PreTrainedModel, input_ids: list[int], steps: int) -> Continuation:
    """Append PyTorch's tokens; logits of the last prompt position and of each appended token."""
    prompt = torch.tensor([input_ids])
    with quiet(), torch.inference_mode():
        # One token more than is fed, for the logits of the last one; EOS must not end it.
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(output.logits).float().numpy()
    sequence = output.sequences[0, :-1].tolist()
    return Continuation(sequence, list(range(len(input_ids) - 1, len(sequence))), logits)


def _padding_shift(model: PreTrainedModel, rows: list[Continuation], steps: int) -> str | None:
    """Return what left padding changes in PyTorch itself; None if, as it should be, nothing.

    Models that are not given position_ids may count padded slots (bart); a bundle does the same,
    and there is nothing to compare with.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        return None
    prompts = [row.input_ids[:-steps] for row in rows]
    width = max(map(len, prompts))
    # Any id will do for padded slots: nothing attends to them.
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with quiet(), torch.inference_mode():
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, -1]
    wanted = np.stack([row.logits[0] for row in rows])
    shift = float(np.abs(logits.float().numpy() - wanted).max())
    if shift <= _MAX_PADDING_SHIFT * float(wanted.std()):
        return None
    return (
        f"a left-padded batch: in PyTorch too its logits differ from single runs by {shift:.2g}, "
        f"as {type(model).__name__} counts padded slots as positions; run its prompts one by one"
    )


def _without_last(sequence: Continuation, tokens: int) -> Continuation:
    """Return what `_greedy` gives for so many tokens less."""
    end, rows = len(sequence.input_ids) - tokens, len(sequence.logits) - tokens
    return Continuation(sequence.input_ids[:end], sequence.positions[:rows], sequence.logits[:rows])
