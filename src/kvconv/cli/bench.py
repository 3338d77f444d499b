"""`kvconv bench`: how fast a bundle runs here, and what memory it takes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvconv.cli.common import Command, needs_extra, print_json, print_status

if TYPE_CHECKING:
    from kvconv.bench import Measurement, Point


class Depths(click.ParamType[tuple[int, ...]]):
    """Comma-separated prompt lengths, in ascending order once each."""

    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the lengths; ascending, because memory that a long run leaves would count."""
        if isinstance(value, tuple):
            return value
        try:
            depths = {int(text) for text in value.split(",")}
        except ValueError:
            depths = {0}
        if min(depths) < 1:
            self.fail(f"{value!r} is not a list of numbers from 1 up, such as 128,2048", param, ctx)
        return tuple(sorted(depths))


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--depths", type=Depths(), default="128,512,2048", show_default=True,
    help="Prompt lengths in tokens; each is a prefill, and the depth where decoding begins.",
)  # fmt: skip
@click.option(
    "--gen", type=click.IntRange(min=1), default=64, show_default=True, metavar="N",
    help="Ids to decode behind the first new one.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
    help="Runs of each depth; the best counts.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Rows that run together; speeds are those of all rows.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(1, 256), envvar="KVCONV_THREADS", show_envvar=True,
    metavar="N", help="Threads; default: one per core.",
)  # fmt: skip
@click.option(
    "--use-bundle-library", is_flag=True,
    help="Run the op library inside the bundle: code from whoever made it.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per point.")
def command(
    bundle: Path,
    depths: tuple[int, ...],
    gen: int,
    repeats: int,
    batch: int,
    threads: int | None,
    use_bundle_library: bool,
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE runs, as `kvconv run` would run it.

    \b
    kvconv bench smollm2 --depths 128,2048 --gen 64 --repeats 3 --threads 2
    kvconv bench smollm2 --batch 8 --depths 512 --json

    What is timed: a run feeds random token ids (a fixed seed, no special ones) and never ends at
    EOS. `prefill` is from the call until the first new id is on the host: the cache is allocated,
    the prompt run in chunks, an id chosen. `decode` is the --gen ids behind that one, each chosen
    greedily and turned into text. A point is the best of --repeats runs, after a short run that
    does not count. Loading the bundle is not timed.

    TTFT is the seconds of the prefill, TPOT those of one decoded id of a row. The memory is what
    the process held at most until the phase ended, the model included (Linux only). A decode step
    reads the weights once and the cache; `of read bandwidth` compares that with how fast the
    machine read 512 MB just before. Cores that other processes kept busy are reported, because on
    a busy machine no figure is worth much.
    """  # noqa: D301 - click wants the control character that \b stands for
    with needs_extra("cpu"):
        from kvconv.bench import Measurement, compare, to_points
        from kvconv.bench.machine import read_bandwidth, usable_cores
        from kvconv.bench.traffic import weight_bytes
    measurement = Measurement.open(bundle, threads=threads, use_bundle_library=use_bundle_library)
    measurement.check(depths, gen=gen, batch=batch)
    opened = measurement.generator.session
    weights = weight_bytes(opened.bundle)
    bandwidth = read_bandwidth(threads or usable_cores())
    if not as_json:
        print_header(measurement, threads or usable_cores(), bandwidth)
    for samples in compare([measurement], depths, gen=gen, batch=batch, repeats=repeats):
        points = to_points(samples[0], opened.manifest, weights=weights, bandwidth=bandwidth)
        print_points(points, as_json=as_json, bundle=bundle)
    if weights is None:
        print_status('Bytes per token were not counted: that needs pip install "kvconv[export]"')


def print_header(measurement: "Measurement", threads: int, bandwidth: float) -> None:
    """Say what is measured, and name the table's columns."""
    manifest = measurement.generator.session.manifest
    click.echo(
        f"{manifest.source.model}, {manifest.attention}, weights {manifest.weights_dtype}, cache "
        f"{manifest.cache_layers[0].dtype}, {threads} threads; memory is read at "
        f"{bandwidth / 1e9:.1f} GB/s"
    )
    click.echo(
        f"{'':8}{'context':>8}{'batch':>6}{'tokens/s':>10}{'seconds':>9}{'TTFT/TPOT':>13}"
        f"{'peak MB':>9}{'MB/token':>9}{'of read bandwidth':>18}"
    )


def print_points(points: "Sequence[Point]", *, as_json: bool, bundle: Path) -> None:
    """Write points to stdout: JSON lines, or rows of the table."""
    for point in points:
        if as_json:
            print_json({"bundle": bundle.name, **dataclasses.asdict(point)})
            continue
        latency = f"{point.ttft_ms or point.tpot_ms:.2f} ms"
        peak = "" if point.peak_rss_mb is None else f"{point.peak_rss_mb:.0f}"
        traffic = "" if point.bytes_per_token is None else f"{point.bytes_per_token / 1e6:.1f}"
        percent = point.percent_of_read_bandwidth
        click.echo(
            f"{point.what:8}{point.context:8d}{point.batch:6d}{point.tokens_per_s:10.1f}"
            f"{point.seconds:9.3f}{latency:>13}{peak:>9}{traffic:>9}"
            f"{'' if percent is None else f'{percent:.0f}%':>18}{_busy_remark(point)}"
        )


def _busy_remark(point: "Point") -> str:
    others = point.other_cores
    return f"  ({others:.1f} cores were busy with something else)" if (others or 0) > 0.1 else ""
