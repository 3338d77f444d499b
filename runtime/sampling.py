"""Choosing the next token of one row, with the semantics of transformers' `generate`.

Logits processors are plain callables (token ids so far, logits) -> logits that never write into
what they are given; a `Sampler` chains them and draws. Rows share nothing, so each may be sampled
differently.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvconv.errors import KvconvError

Logits = npt.NDArray[np.float32]
"""[vocab_size] float32: one row."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    Attributes:
        max_new_tokens: Most tokens to add, >= 1.
        temperature: 0, or in [0.001, 1000]; logits are divided by it. 1 leaves them as they are; 0
            takes the most likely token, and top_k, top_p, min_p and seed then change nothing.
        top_k: >= 0; keep so many of the most likely tokens. 0 keeps all.
        top_p: In [0, 1]; keep the fewest most likely tokens whose probabilities add up to it.
            1 keeps all.
        min_p: In [0, 1]; keep tokens at least so likely, relative to the most likely. 0 keeps all.
        repetition_penalty: In [0.001, 1000]; logits of tokens in the prompt or the output are
            divided by it when positive, multiplied when negative. 1 changes nothing.
        seed: >= 0 for draws that can be repeated, in any batch; None for new ones each time.
        stop: Strings that end the text; they are cut off.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "[1, inf)")
        # Far outside these, float32 logits overflow.
        is_temperature = self.temperature == 0 or 1e-3 <= self.temperature <= 1e3
        _check("temperature", self.temperature, is_temperature, "0, or in [0.001, 1000]")
        _check("top_k", self.top_k, self.top_k >= 0, "[0, inf)")
        _check("top_p", self.top_p, 0 <= self.top_p <= 1, "[0, 1]")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "[0, 1]")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 1e-3 <= penalty <= 1e3, "[0.001, 1000]")
        _check("seed", self.seed, self.seed is None or self.seed >= 0, "[0, inf)")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")


class LogitsProcessor(Protocol):
    """Changes the logits of one row."""

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return changed logits.

        Args:
            token_ids: The row's prompt and output so far, without padding.
            logits: [vocab_size] float32; not written to.
        """


class Sampler:
    """Chooses the tokens of one row; holds that row's random state.

    Args:
        params: How to choose.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._processors = make_logits_processors(params)
        self._random: np.random.Generator | None = None
        if params.temperature > 0:
            self._random = np.random.default_rng(params.seed)

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> int:
        """Return the next token's id; advances the random state unless greedy.

        Args:
            token_ids: The row's prompt and output so far, without padding.
            logits: [vocab_size] float32; not written to.

        Raises:
            KvconvError: The logits are not numbers.
        """
        for processor in self._processors:
            logits = processor(token_ids, logits)
        best = int(logits.argmax())
        largest = logits.item(best)
        if not math.isfinite(largest):
            raise KvconvError(
                f"The model's logits hold {largest}. Run `kvconv verify` on the bundle, or "
                f"export it with --dtype float32."
            )
        if self._random is None:
            return best
        cumulative = np.cumsum(np.exp(logits - logits[best], dtype=np.float64))
        threshold = self._random.random() * cumulative[-1]
        return int(np.searchsorted(cumulative, threshold, side="right"))


def make_logits_processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors that params ask for, in transformers' order.

    The penalty comes first and always; the others only when sampling, because they cannot move
    the maximum.
    """
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenalty(params.repetition_penalty))
    if params.temperature == 0:
        return processors
    if params.temperature != 1:
        processors.append(Temperature(params.temperature))
    if params.top_k > 0:
        processors.append(TopK(params.top_k))
    if params.top_p < 1:
        processors.append(TopP(params.top_p))
    if params.min_p > 0:
        processors.append(MinP(params.min_p))
    return processors


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Makes tokens that occurred less likely (penalty > 1), once per distinct id.

    Keskar et al. 2019, CTRL, section 4.1; the sign rule is transformers'.
    """

    penalty: float

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return logits with the penalty on every id that occurred."""
        # An id that occurred twice is written twice, with the same value.
        seen = np.asarray(token_ids, np.int64)
        penalty = np.float32(self.penalty)
        penalised = logits.copy()
        penalised[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
        return penalised


@dataclass(frozen=True, slots=True)
class Temperature:
    """Flattens (> 1) or sharpens (< 1) the distribution."""

    temperature: float

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return logits divided by the temperature."""
        return logits / np.float32(self.temperature)


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the k most likely tokens, and those equal to the last of them."""

    top_k: int

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return logits with all others at minus infinity."""
        top_k = min(self.top_k, logits.size)
        return _keep(logits, logits >= np.partition(logits, -top_k)[-top_k])


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the fewest most likely tokens whose probabilities add up to top_p, at least one.

    Holtzman et al. 2020, nucleus sampling.
    """

    top_p: float

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return logits with all others at minus infinity."""
        probabilities = _softmax(logits)
        cut = 1 - self.top_p
        # All tokens below an equal share of the cut add up to less than it: they need no sorting.
        candidates = np.flatnonzero(probabilities >= cut / logits.size)
        ascending = candidates[np.argsort(probabilities[candidates], kind="stable")]
        unsorted = 1 - probabilities[candidates].sum()
        is_cut = unsorted + np.cumsum(probabilities[ascending]) <= cut
        is_cut[-1] = False
        kept = np.zeros(logits.shape, np.bool_)
        kept[ascending[~is_cut]] = True
        return _keep(logits, kept)


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps tokens at least min_p times as likely as the most likely one."""

    min_p: float

    def __call__(self, token_ids: Sequence[int], logits: Logits) -> Logits:
        """Return logits with all others at minus infinity."""
        probabilities = _softmax(logits)
        return _keep(logits, probabilities >= self.min_p * probabilities.max())


def _keep(logits: Logits, kept: npt.NDArray[np.bool_]) -> Logits:
    return np.where(kept, logits, np.float32(-np.inf))


def _softmax(logits: Logits) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max(), dtype=np.float64)
    return np.asarray(weights / weights.sum())


def _check(name: str, value: Any, valid: bool, interval: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value}; it must be in {interval}")
