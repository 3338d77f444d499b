"""Points: the arithmetic of samples."""

import dataclasses

import pytest

from kvconv.bench import Sample, to_points
from kvconv.manifest import CacheLayer
from scripted_session import MANIFEST


def sample(prefill_s: float, decode_s: float, peak: float | None = 100.0, batch: int = 1) -> Sample:
    return Sample(
        context=10,
        batch=batch,
        prefill_s=prefill_s,
        decode_s=decode_s,
        token_ids=tuple(range(21)),
        prefill_peak_rss_mb=peak,
        peak_rss_mb=None if peak is None else peak + 1,
        other_cores=prefill_s / 10,
    )


def points(*samples: Sample, layers=MANIFEST.cache_layers, **options):
    manifest = dataclasses.replace(MANIFEST, cache_layers=layers)
    return to_points(samples, manifest, **{"weights": None, "bandwidth": None, **options})


def test_best_run_counts_for_each_phase():
    prefill, decode = points(sample(2, 5), sample(4, 3, peak=120.0))
    assert (prefill.what, prefill.seconds, prefill.tokens_per_s) == ("prefill", 2, 5)
    assert (decode.what, decode.seconds, decode.tokens_per_s) == ("decode", 3, 6.67)
    assert (prefill.runs, decode.runs) == ((2, 4), (5, 3))
    assert (prefill.ttft_ms, prefill.tpot_ms) == (2000, None)
    assert (decode.ttft_ms, decode.tpot_ms) == (None, 150)
    assert (prefill.other_cores, decode.other_cores) == (0.2, 0.4)
    assert (prefill.peak_rss_mb, decode.peak_rss_mb) == (120, 121)
    assert prefill.first_ids == decode.first_ids == tuple(range(12))


def test_speed_of_a_batch_is_that_of_all_rows():
    prefill, decode = points(sample(2, 5, batch=4))
    assert (prefill.tokens_per_s, decode.tokens_per_s) == (20, 16)
    assert decode.tpot_ms == 250


def test_unknown_memory_stays_unknown():
    prefill, decode = points(sample(1, 1, peak=None))
    assert prefill.peak_rss_mb is None
    assert decode.peak_rss_mb is None


def test_bytes_of_a_token_are_the_weights_and_the_cache_of_the_average_step():
    # 20 steps read 11 to 30 tokens, 20.5 on average, of 3 heads x (4 + 6) float32 values.
    layer = CacheLayer(3, 4, 6, "float32")
    _, decode = points(sample(1, 2), layers=(layer,), weights=1000, bandwidth=100_000.0)
    assert decode.bytes_per_token == 1000 + 20.5 * 120
    assert decode.percent_of_read_bandwidth == pytest.approx(100 * 3460 * 10 / 100_000)


def test_rows_of_a_batch_share_the_weights():
    layer = CacheLayer(3, 4, 6, "float32")
    _, decode = points(sample(1, 2, batch=4), layers=(layer,), weights=1000)
    assert decode.bytes_per_token == 250 + 20.5 * 120
    assert decode.percent_of_read_bandwidth is None


def test_windowed_layer_reads_its_window():
    layer = CacheLayer(1, 1, 1, "float16", window_size=16)
    _, decode = points(sample(1, 2), layers=(layer,), weights=0)
    # Steps 11 to 15 read fewer tokens than the window has.
    assert decode.bytes_per_token == round((sum(range(11, 17)) + 14 * 16) / 20 * 4)
