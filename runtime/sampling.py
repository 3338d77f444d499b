"""Choosing the next token of one row, with the semantics of transformers' `generate`.

Two kinds of plain callables, chained by a `Sampler`: a logits processor (token ids so far, logits)
-> logits changes all of a row's logits and never writes into what it is given; a token filter
(logits) -> indices says which of them go on, so that what follows works on those few alone. Rows
share nothing, so each may be sampled differently.

`runtime/native/src/sampling.cc` computes the same, operation by operation, so that one seed gives
the same tokens there. Probabilities are float64 for that: float32 exponentials differ between
libraries in their last bits, which would let about one draw in ten thousand fall otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvconv.errors import KvconvError
from kvconv.runtime.split_mix import SplitMix64

Logits = npt.NDArray[np.float32]
"""[vocab_size] float32: one row."""
Indices = npt.NDArray[np.int64]
_DRAW_BLOCK = 256


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
        seed: In [0, 2**64) for draws that can be repeated, in any batch; None for new ones each
            time.
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
        _check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "[0, 2**64)")
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


class TokenFilter(Protocol):
    """Says which tokens may be drawn."""

    def __call__(self, logits: Logits) -> Indices:
        """Return the places of those that go on, ascending, at least one.

        Args:
            logits: [tokens] float32, those of the tokens that are left; not written to.
        """


class Sampler:
    """Chooses the tokens of one row; holds that row's random state.

    Args:
        params: How to choose.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._processors = make_logits_processors(params)
        self._filters = make_token_filters(params)
        self._random = SplitMix64(params.seed) if params.temperature > 0 else None

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
        ids: Indices | None = None
        for keep in self._filters:
            kept = keep(logits)
            logits = logits[kept]
            ids = kept if ids is None else ids[kept]
        drawn = _draw(_weights(logits), self._random.random())
        return drawn if ids is None else int(ids[drawn])


def make_logits_processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Return the processors that params ask for, in transformers' order.

    The temperature is left out of greedy choice, because it cannot move the maximum.
    """
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenalty(params.repetition_penalty))
    if params.temperature not in (0, 1):
        processors.append(Temperature(params.temperature))
    return processors


def make_token_filters(params: SamplingParams) -> list[TokenFilter]:
    """Return the filters that params ask for, in transformers' order; none for greedy choice."""
    filters: list[TokenFilter] = []
    if params.temperature == 0:
        return filters
    if params.top_k > 0:
        filters.append(TopK(params.top_k))
    if params.top_p < 1:
        filters.append(TopP(params.top_p))
    if params.min_p > 0:
        filters.append(MinP(params.min_p))
    return filters


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

    def __call__(self, logits: Logits) -> Indices:
        """Return the places of the k largest."""
        top_k = min(self.top_k, logits.size)
        return np.flatnonzero(logits >= np.partition(logits, -top_k)[-top_k])


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the fewest most likely tokens whose probabilities add up to top_p, at least one.

    Holtzman et al. 2020, nucleus sampling.
    """

    top_p: float

    def __call__(self, logits: Logits) -> Indices:
        """Return the places of the nucleus."""
        weights = _weights(logits)
        total = weights.sum()
        cut = (1 - self.top_p) * total
        # All tokens below an equal share of the cut add up to less than it: they need no sorting.
        candidates = np.flatnonzero(weights >= min(cut / weights.size, 1))
        ascending = candidates[np.argsort(weights[candidates], kind="stable")]
        sums = np.cumsum(weights[ascending])
        is_cut = total - sums[-1] + sums <= cut
        is_cut[-1] = False
        return np.sort(ascending[~is_cut])


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps tokens at least min_p times as likely as the most likely one."""

    min_p: float

    def __call__(self, logits: Logits) -> Indices:
        """Return their places."""
        return np.flatnonzero(_weights(logits) >= self.min_p)


def _weights(logits: Logits) -> npt.NDArray[np.float64]:
    """Return probabilities in parts of the largest."""
    weights: npt.NDArray[np.float64] = np.subtract(logits, logits.max(), dtype=np.float64)
    np.exp(weights, out=weights)
    return weights


def _draw(weights: npt.NDArray[np.float64], uniform: float) -> int:
    """Return a place, each as likely as its weight.

    A block of them is drawn first: one running sum over a whole vocabulary takes longer than all
    else that sampling does.

    Args:
        weights: [tokens] float64, >= 0, not all 0.
        uniform: In [0, 1), what chance says.
    """
    starts = np.arange(0, weights.size, _DRAW_BLOCK)
    block, rest = _place(np.add.reduceat(weights, starts), uniform)
    start = block * _DRAW_BLOCK
    return start + _place(weights[start : start + _DRAW_BLOCK], rest)[0]


def _place(weights: npt.NDArray[np.float64], uniform: float) -> tuple[int, float]:
    """Return where the running sum first exceeds `uniform` of the whole, and how far in, < 1."""
    sums = np.cumsum(weights)
    threshold = uniform * sums[-1]
    place = int(np.searchsorted(sums, threshold, side="right"))
    before = sums[place - 1] if place else 0.0
    return place, float((threshold - before) / (sums[place] - before))


def _check(name: str, value: Any, valid: bool, interval: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value}; it must be in {interval}")
