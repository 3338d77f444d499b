"""A chart of speed over depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvconv.bench.point import Point
from kvconv.errors import OutputExistsError


def check_chart(path: Path) -> None:
    """Refuse a file that no chart could be written to, before anything is measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: The name's ending is no image format.
        OutputExistsError: The file cannot be opened.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"})  # needs LaTeX
    ending = path.suffix.removeprefix(".").lower()
    if ending not in endings:
        raise ValueError(
            f"The chart {path} ends in {path.suffix or 'nothing'}, which is no image format; "
            f"choose one of .{', .'.join(endings)}."
        )
    is_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise OutputExistsError(
            f"The chart {path} cannot be written: {error.strerror}. Make its folder, or choose "
            f"another place.",
            path=str(path),
        ) from error
    if not is_there:
        path.unlink()


def draw_chart(points: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write tokens per second over context, prefill and decode beside each other.

    Args:
        points: Of each bundle, by its label.
        path: Where to; see `check_chart`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("prefill", "decode"), strict=True):
        for label, all_points in points.items():
            chosen = [point for point in all_points if point.what == what]
            axes.plot(
                [point.context for point in chosen],
                [point.tokens_per_s for point in chosen],
                marker="o",
                label=label,
            )
        axes.set_xscale("log", base=2)
        contexts = sorted({point.context for all_points in points.values() for point in all_points})
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.set_ylim(bottom=0)
        axes.set_title(what)
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("tokens/s")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
