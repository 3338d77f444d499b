"""What `kvconv bench` prints: rows of tables, or JSON lines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from kvconv.cli.common import print_json

if TYPE_CHECKING:
    from kvconv.bench import Measurement, Point, Profile, Ratio

_BUSY_CORES = 0.1


def describe(label: str, measurement: "Measurement") -> None:
    """Say what a bundle is."""
    manifest = measurement.generator.session.manifest
    click.echo(
        f"{label}: {manifest.source.model}, {manifest.attention}, weights "
        f"{manifest.weights_dtype}, cache {manifest.cache_layers[0].dtype}"
    )


def print_header(threads: int, bandwidth: float) -> None:
    """Say how is measured, and name the table's columns."""
    click.echo(f"{threads} threads; memory is read at {bandwidth / 1e9:.1f} GB/s")
    click.echo(
        f"{'':8}{'context':>8}{'batch':>6}{'tokens/s':>10}{'seconds':>9}{'TTFT/TPOT':>13}"
        f"{'peak MB':>9}{'MB/token':>9}{'of read bandwidth':>18}"
    )


def print_point(point: "Point", label: str) -> None:
    """Write a row of the table; the label is shown where it is not empty."""
    latency = f"{point.ttft_ms or point.tpot_ms:.2f} ms"
    peak = "" if point.peak_rss_mb is None else f"{point.peak_rss_mb:.0f}"
    traffic = "" if point.bytes_per_token is None else f"{point.bytes_per_token / 1e6:.1f}"
    percent = point.percent_of_read_bandwidth
    others = point.other_cores or 0
    click.echo(
        f"{point.what:8}{point.context:8d}{point.batch:6d}{point.tokens_per_s:10.1f}"
        f"{point.seconds:9.3f}{latency:>13}{peak:>9}{traffic:>9}"
        f"{'' if percent is None else f'{percent:.0f}%':>18}"
        f"{f'  {label}' if label else ''}"
        f"{f'  ({others:.1f} cores were busy otherwise)' if others > _BUSY_CORES else ''}"
    )


def print_ratio(ratio: "Ratio") -> None:
    """Write how many times as fast the first bundle is, and the same of single rounds."""
    click.echo(f"{'':16}{ratio.best:.2f}x (rounds {ratio.lowest:.2f} to {ratio.highest:.2f})")


def print_json_points(points: "Mapping[str, Point]", ratio: "Ratio | None", threads: int) -> None:
    """Write one JSON line for a point of one bundle, with that of the other inside, if any."""
    (label, point), *others = points.items()
    document = {"bundle": label, "threads": threads, **dataclasses.asdict(point)}
    for other_label, other in others:
        document["against"] = {"bundle": other_label, **dataclasses.asdict(other)}
    if ratio is not None:
        document["ratio"] = dataclasses.asdict(ratio)
    print_json(document)


def print_profiles(label: str, profiles: "Sequence[Profile]", *, as_json: bool) -> None:
    """Write where time goes, the slowest operator first."""
    for profile in profiles:
        if as_json:
            print_json({"bundle": label, "what": "profile", **dataclasses.asdict(profile)})
            continue
        of_a_run = "a step" if profile.phase == "decode" else "a chunk"
        click.echo(
            f"\n{label}, {profile.phase} at {profile.context}: {profile.ms:.2f} ms {of_a_run} "
            f"({profile.runs} of them, profiled)"
        )
        for op in profile.ops:
            nodes = str(op.nodes or "")
            click.echo(f"  {op.ms:9.3f} ms {op.percent:5.1f}%{nodes:>6}  {op.op}")
