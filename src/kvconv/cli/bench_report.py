"""What `kvconv bench` prints: rows of tables, or JSON lines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from kvconv.cli.common import print_json

if TYPE_CHECKING:
    from kvconv.bench import Measurement, Point, Profile, Ratio
    from kvconv.bench.attention_op import AttentionPoint

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


def print_op_header() -> None:
    """Name the columns of `print_op_point`."""
    click.echo(
        f"{'':8}{'context':>8}  {'heads':12}{'variant':10}{'cache':8}{'ms':>9}{'GQA ms':>9}"
        f"{'faster':>8}{'rate':>14}  of what the machine allows"
    )


def print_op_point(point: "AttentionPoint", *, as_json: bool) -> None:
    """Write what one case of the attention op took, beside GroupQueryAttention and the roofs."""
    case = point.case
    percents = {name: round(percent, 1) for name, percent in point.percent_of_roofs.items()}
    if as_json:
        print_json(
            {
                **dataclasses.asdict(point),
                "case": dataclasses.asdict(case),
                "speedup": round(point.speedup, 3),
                "percent_of_roofs": percents,
            }
        )
        return
    heads = f"{case.heads.num_heads}/{case.heads.kv_num_heads} x {case.heads.head_dim}"
    unit = "GB/s" if case.what == "decode" else "GFLOP/s"
    roofs = ", ".join(f"{percent:.0f}% {name}" for name, percent in percents.items())
    if case.cache != "float32":
        roofs += f"; {point.float_seconds / point.seconds:.2f}x as fast as over float32"
    click.echo(
        f"{case.what:8}{case.context:8d}  {heads:12}{case.variant:10}{case.cache:8}"
        f"{1e3 * point.seconds:9.3f}"
        f"{1e3 * point.gqa_seconds:9.3f}{point.speedup:7.2f}x{point.rate / 1e9:7.1f} {unit:7}"
        f" {roofs}"
    )
