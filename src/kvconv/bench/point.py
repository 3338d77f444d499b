"""A point: the best of several runs at one depth, for one phase."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvconv.bench.sample import Sample
from kvconv.bench.traffic import cache_bytes
from kvconv.manifest import Manifest

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Point:
    """What `kvconv bench --json` prints, one line each.

    Attributes:
        what: `prefill` (the prompt) or `decode` (the ids behind the first new one).
        context: Prompt tokens per row.
        batch: Rows.
        tokens_per_s: Of all rows together, in the best run.
        seconds: The best run's.
        peak_rss_mb: The most that any run held resident until its phase ended, in MB (10^6 bytes);
            None where unknown.
        runs: Seconds of every run, in order.
        ttft_ms: Time to first token; of a prefill only.
        tpot_ms: Time per output token of a row; of a decode only.
        bytes_per_token: Bytes that a decode step must read, per row; None for a prefill, and where
            the graph's weights could not be counted.
        percent_of_read_bandwidth: What reading them at tokens_per_s is of the measured bandwidth.
        first_ids: The first row's first new ids, to see that two runs computed the same.
        other_cores: Cores that other processes kept busy during the best run; a point with more
            than 0.1 is not to be trusted. None where unknown.
    """

    what: Phase
    context: int
    batch: int
    tokens_per_s: float
    seconds: float
    peak_rss_mb: float | None
    runs: tuple[float, ...]
    ttft_ms: float | None
    tpot_ms: float | None
    bytes_per_token: int | None
    percent_of_read_bandwidth: float | None
    first_ids: tuple[int, ...]
    other_cores: float | None


_FIRST_IDS = 12


def to_points(
    samples: Sequence[Sample],
    manifest: Manifest,
    *,
    weights: int | None,
    bandwidth: float | None,
) -> tuple[Point, Point]:
    """Return the prefill's and the decode's point of runs at one depth.

    Args:
        samples: One or more, of one context and batch.
        manifest: Of the bundle.
        weights: Bytes of weights that a step reads, as `weight_bytes` tells.
        bandwidth: Bytes per second that the machine can read; None where not measured.
    """
    context, batch = samples[0].context, samples[0].batch
    prefill = min(samples, key=lambda sample: sample.prefill_s)
    decode = min(samples, key=lambda sample: sample.decode_s)
    steps = decode.num_decoded
    decode_rate = batch * steps / decode.decode_s
    # The cache grows by a token a step; a step reads what it has just written, too.
    cached = [cache_bytes(manifest, context + step) for step in range(1, steps + 1)]
    per_token = None if weights is None else round(weights / batch + sum(cached) / steps)
    percent = None
    if per_token is not None and bandwidth is not None:
        percent = round(100 * per_token * decode_rate / bandwidth, 1)
    first_ids = samples[0].token_ids[:_FIRST_IDS]
    return (
        Point(
            what="prefill",
            context=context,
            batch=batch,
            tokens_per_s=round(batch * context / prefill.prefill_s, 2),
            seconds=round(prefill.prefill_s, 5),
            peak_rss_mb=_peak([sample.prefill_peak_rss_mb for sample in samples]),
            runs=tuple(round(sample.prefill_s, 5) for sample in samples),
            ttft_ms=round(1e3 * prefill.prefill_s, 3),
            tpot_ms=None,
            bytes_per_token=None,
            percent_of_read_bandwidth=None,
            first_ids=first_ids,
            other_cores=prefill.other_cores,
        ),
        Point(
            what="decode",
            context=context,
            batch=batch,
            tokens_per_s=round(decode_rate, 2),
            seconds=round(decode.decode_s, 5),
            peak_rss_mb=_peak([sample.peak_rss_mb for sample in samples]),
            runs=tuple(round(sample.decode_s, 5) for sample in samples),
            ttft_ms=None,
            tpot_ms=round(1e3 * decode.decode_s / steps, 3),
            bytes_per_token=per_token,
            percent_of_read_bandwidth=percent,
            first_ids=first_ids,
            other_cores=decode.other_cores,
        ),
    )


def _peak(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 1) if known else None
