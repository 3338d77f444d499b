"""`kvconv bench`: how fast a bundle runs here, and what memory it takes."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvconv.cli.bench_report import (
    describe,
    print_header,
    print_json_points,
    print_op_header,
    print_op_point,
    print_point,
    print_profiles,
    print_ratio,
)
from kvconv.cli.common import (
    Command,
    cuda_graph_option,
    needs_extra,
    prefill_chunk_option,
    print_status,
    provider_option,
    require_stdout,
    spin_option,
)


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
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
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
@spin_option
@provider_option
@cuda_graph_option
@prefill_chunk_option
@click.option(
    "--use-bundle-library", is_flag=True,
    help="Run the op library inside the bundle: code from whoever made it.",
)  # fmt: skip
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="BUNDLE2",
    help="Take turns with another bundle, and print how many times as fast BUNDLE is.",
)  # fmt: skip
@click.option(
    "--profile", "is_profiled", is_flag=True,
    help="Run each depth once more under ONNX Runtime's profiler; print the time by operator.",
)  # fmt: skip
@click.option(
    "--plot", "chart", type=click.Path(path_type=Path), metavar="FILE.png",
    help='Draw tokens/s over depth; needs pip install "kvconv[plot]".',
)  # fmt: skip
@click.option(
    "--op", "is_op", is_flag=True,
    help="Measure the attention op alone, without a BUNDLE; needs pip install "
    '"kvconv[cpu,export]".',
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per point.")
def command(
    bundle: Path | None,
    depths: tuple[int, ...],
    gen: int,
    repeats: int,
    batch: int,
    threads: int | None,
    spin: bool,
    provider: Any,
    cuda_graph: bool,
    prefill_chunk: int | None,
    use_bundle_library: bool,
    against: Path | None,
    is_profiled: bool,
    chart: Path | None,
    is_op: bool,
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE runs, as `kvconv run` would run it.

    \b
    kvconv bench smollm2 --depths 128,2048 --gen 64 --repeats 3 --threads 2
    kvconv bench smollm2 --batch 8 --depths 512 --json
    kvconv bench smollm2-int4 --against smollm2 --plot speed.png
    kvconv bench smollm2 --depths 128 --repeats 1 --profile

    What is timed: a run feeds random token ids (a fixed seed, no special ones) and never ends at
    EOS. `prefill` is from the call until the first new id is on the host: the cache is allocated,
    the prompt run in chunks, an id chosen. `decode` is the --gen ids behind that one, each chosen
    greedily and turned into text. A point is the best of --repeats runs, after a short run that
    does not count. Loading the bundle is not timed.

    TTFT is the seconds of the prefill, TPOT those of one decoded id of a row. The memory is what
    the process held at most until the phase ended, the model included (Linux only; not with
    --against, where two models share the process). A decode step reads the weights once and the
    cache; `of read bandwidth` compares that with how fast the machine read 512 MB just before.
    Cores that other processes kept busy are reported, because on a busy machine no figure is worth
    much; ratios of --against are of runs that took turns.

    --op takes turns between kvconv's FlashAttention, ONNX Runtime's GroupQueryAttention on the same
    tensors, and what the machine allows (reading and copying memory, float32 matrix products), at
    --depths, with --repeats and --threads; kvconv's over int8 and int4 caches too.
    """  # noqa: D301 - click wants the control character that \b stands for
    if is_op != (bundle is None):
        raise click.UsageError("Give either a BUNDLE or --op.")
    require_stdout()
    if bundle is None:
        require_op_options_only()
        measure_op(depths, threads=threads, repeats=repeats, as_json=as_json)
        return
    with needs_extra("cpu"):
        from kvconv.bench import Measurement, Point, Ratio, compare, profile, to_points
        from kvconv.bench.machine import read_bandwidth, usable_cores
        from kvconv.bench.traffic import weight_bytes
    if chart is not None:
        with needs_extra("plot"):
            from kvconv.bench.chart import check_chart, draw_chart

            try:
                check_chart(chart)
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="--plot") from error
    paths = [bundle] if against is None else [bundle, against]
    labels = [path.name for path in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in paths]
    measurements = [
        Measurement.open(
            path,
            threads=threads,
            use_bundle_library=use_bundle_library,
            prefill_chunk=prefill_chunk,
            spin=spin,
            provider=provider,
            cuda_graph=cuda_graph,
        )
        for path in paths
    ]
    runs = compare(measurements, depths, gen=gen, batch=batch, repeats=repeats)
    sessions = [measurement.generator.session for measurement in measurements]
    weights = [weight_bytes(session.bundle) for session in sessions]
    num_threads = threads or usable_cores()
    bandwidth = read_bandwidth(num_threads)
    if not as_json:
        for label, measurement in zip(labels, measurements, strict=True):
            describe(label, measurement)
        print_header(num_threads, bandwidth)
    drawn: dict[str, list[Point]] = {label: [] for label in labels}
    for samples in runs:
        both = [
            to_points(
                own,
                session.manifest,
                weights=count,
                bandwidth=bandwidth if provider == "cpu" else None,  # it is the host's
            )
            for own, session, count in zip(samples, sessions, weights, strict=True)
        ]
        for phase in zip(*both, strict=True):
            points = dict(zip(labels, phase, strict=True))
            ratio = Ratio.of(*(point.runs for point in phase)) if against is not None else None
            for label, point in points.items():
                drawn[label].append(point)
                if not as_json:
                    print_point(point, label if against is not None else "")
            if as_json:
                print_json_points(points, ratio, num_threads)
            elif ratio is not None:
                print_ratio(ratio)
    if None in weights:
        print_status('Bytes per token were not counted: that needs pip install "kvconv[export]"')
    if chart is not None:
        draw_chart(drawn, chart)
    if is_profiled:
        for path, label in zip(paths, labels, strict=True):
            for depth in depths:
                profiles = profile(
                    path,
                    depth,
                    gen=gen,
                    batch=batch,
                    threads=threads,
                    use_bundle_library=use_bundle_library,
                    prefill_chunk=prefill_chunk,
                    spin=spin,
                    provider=provider,
                )
                print_profiles(label, profiles, as_json=as_json)


def require_op_options_only() -> None:
    """Refuse options that --op would ignore."""
    ctx = click.get_current_context()
    taken = {"is_op", "depths", "threads", "repeats", "as_json"}
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if is_given and param.expose_value and param.name not in taken:
            raise click.UsageError(f"{param.opts[0]} is for a BUNDLE; --op does not take it.")


def measure_op(
    depths: tuple[int, ...], *, threads: int | None, repeats: int, as_json: bool
) -> None:
    """Measure the attention op: plain with every shape of heads, all else with the first.

    That is its variants, and the types of quantised caches.
    """
    with needs_extra("cpu,export"):
        from kvconv.bench.attention_op import SHAPES, cases, measure_attention
        from kvconv.bench.machine import usable_cores
    chosen = cases(decode=depths, prefill=depths, variants=("plain",))
    chosen += cases(
        decode=depths, prefill=depths, shapes=SHAPES[:1], variants=("softcap", "head_sink")
    )
    chosen += cases(
        decode=depths,
        prefill=depths,
        shapes=SHAPES[:1],
        variants=("plain",),
        caches=("int8", "int4"),
    )
    points = measure_attention(chosen, threads=threads or usable_cores(), repeats=repeats)
    if not as_json:
        print_op_header()
    for point in points:
        print_op_point(point, as_json=as_json)
