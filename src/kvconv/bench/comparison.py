"""Bundles against each other: their runs take turns, so that a busy machine slows all alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvconv.bench.measurement import Measurement
from kvconv.bench.sample import Sample


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast the first of two bundles is.

    Attributes:
        best: Best run against best run.
        lowest: Of the rounds, each of which ran both.
        highest: Likewise.
    """

    best: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, seconds: Sequence[float], others: Sequence[float]) -> "Ratio":
        """Compare the seconds of two bundles, round by round."""
        rounds = [other / own for own, other in zip(seconds, others, strict=True)]
        best = min(others) / min(seconds)
        return cls(round(best, 3), round(min(rounds), 3), round(max(rounds), 3))


def compare(
    measurements: Sequence[Measurement],
    contexts: Sequence[int],
    *,
    gen: int,
    batch: int,
    repeats: int,
) -> Iterator[list[list[Sample]]]:
    """Run one bundle or several; returns what yields each depth's samples as soon as it is done.

    Args:
        measurements: One or more; they take turns, and every other round in reverse.
        contexts: Depths, in order.
        gen: Ids behind the first new one, >= 1.
        batch: Rows, >= 1.
        repeats: Rounds, >= 1.

    Returns:
        Per depth: per measurement, one sample a round. Without memory where there are several
        measurements, for they share this process.

    Raises:
        CacheFullError: A depth does not fit one of them; nothing has run.
    """
    for measurement in measurements:
        measurement.check(contexts, gen=gen, batch=batch)
    return _rounds(measurements, contexts, gen, batch, repeats)


def _rounds(
    measurements: Sequence[Measurement],
    contexts: Sequence[int],
    gen: int,
    batch: int,
    repeats: int,
) -> Iterator[list[list[Sample]]]:
    for measurement in measurements:
        measurement.warm_up(batch)
    for context in contexts:
        prompts = [measurement.prompts(context, batch) for measurement in measurements]
        samples: list[list[Sample]] = [[] for _ in measurements]
        for round_index in range(repeats):
            order = range(len(measurements))
            for i in order if round_index % 2 == 0 else reversed(order):
                samples[i].append(measurements[i].run(prompts[i], gen))
        if len(measurements) > 1:
            samples = [[sample.without_memory() for sample in own] for own in samples]
        yield samples
