"""Bundles take turns, and ratios say how many times as fast the first is."""

import pytest

from kvconv.bench import Ratio, Sample, compare
from kvconv.errors import CacheFullError


class Recorded:
    """A measurement that notes its calls."""

    def __init__(self, name: str, log: list[str], limit: int = 1000) -> None:
        self.name, self.log, self.limit = name, log, limit

    def check(self, contexts, *, gen, batch):
        if max(contexts) > self.limit:
            raise CacheFullError("too deep", needed=max(contexts), capacity=self.limit)

    def warm_up(self, batch):
        self.log.append(f"warm {self.name}")

    def prompts(self, context, batch):
        return (context, batch)

    def run(self, prompts, gen):
        context, batch = prompts
        self.log.append(f"{self.name}{context}")
        return Sample(context, batch, 1.0, 2.0, (0,) * (gen + 1), 5.0, 6.0, 0.0)


def test_bundles_take_turns_every_other_round_in_reverse():
    log: list[str] = []
    measurements = [Recorded("a", log), Recorded("b", log)]
    rounds = list(compare(measurements, [3, 9], gen=4, batch=2, repeats=2))
    assert log == ["warm a", "warm b", "a3", "b3", "b3", "a3", "a9", "b9", "b9", "a9"]
    assert [[len(own) for own in samples] for samples in rounds] == [[2, 2], [2, 2]]
    assert {sample.batch for samples in rounds for own in samples for sample in own} == {2}


def test_memory_is_told_for_a_bundle_alone_only():
    (alone,) = compare([Recorded("a", [])], [3], gen=1, batch=1, repeats=1)
    assert (alone[0][0].prefill_peak_rss_mb, alone[0][0].peak_rss_mb) == (5.0, 6.0)
    (both,) = compare([Recorded("a", []), Recorded("b", [])], [3], gen=1, batch=1, repeats=1)
    assert {own[0].peak_rss_mb for own in both} == {None}
    assert {own[0].prefill_peak_rss_mb for own in both} == {None}


def test_depth_that_does_not_fit_the_second_is_refused_before_anything_runs():
    log: list[str] = []
    with pytest.raises(CacheFullError):
        compare([Recorded("a", log), Recorded("b", log, 8)], [3, 9], gen=1, batch=1, repeats=1)
    assert log == []


def test_ratio_is_of_the_best_runs_with_the_range_of_the_rounds():
    assert Ratio.of([2.0, 4.0, 5.0], [6.0, 4.0, 20.0]) == Ratio(best=2.0, lowest=1.0, highest=4.0)
