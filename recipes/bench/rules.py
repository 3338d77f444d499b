"""Measure what each graph rule is worth: a bundle without it beside the whole one.

Usage: python recipes/bench/rules.py MODEL FOLDER [--weights int4] [--depth 128]

Exports MODEL into FOLDER with all rules, and without packed projections; what lies there already
is used again. The other bundles share the weights of the first and differ in their graphs: all are
made of a graph without any optional rule. They take turns in one process; a point is the best of
its rounds. Prints a Markdown table of the rules that fire: nodes, and milliseconds of a prefill and
of a decode step, in parts of those with all rules too. A rule that others build on (`heads`,
`norm`, `pack`, `rotary`) is worth what they are, too.
"""

import argparse
from pathlib import Path

import onnx
from derived import derive

from kvconv import names
from kvconv.bench import Measurement, compare
from kvconv.converter import ExportOptions, export
from kvconv.converter.rewrite import OPTIONAL_RULES
from kvconv.manifest import read_manifest

ALL = "all rules"
NONE = "no optional rule"


def prepare(model: str, folder: Path, weights: str) -> dict[str, Path]:
    """Return name of what is left out -> bundle; makes those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    bundles = {}
    for name, without in ((NONE, OPTIONAL_RULES), ("pack", frozenset({"pack"}))):
        bundles[name] = folder / name.replace(" ", "-")
        if not bundles[name].exists():
            options = ExportOptions(
                weights=None if weights == "float32" else weights, without=without
            )
            export(model, bundles[name], options)
    bundles[ALL] = derive(bundles[NONE], folder / ALL.replace(" ", "-"))
    counts = read_manifest(bundles[ALL]).rewrites
    fired = [name for name in counts if name in OPTIONAL_RULES and counts[name]]
    bundles |= {name: derive(bundles[NONE], folder / name, without={name}) for name in fired}
    return {name: bundles[name] for name in (ALL, NONE, "pack", *fired)}


def num_nodes(bundle: Path) -> int:
    """Return the nodes of a bundle's graph."""
    return len(onnx.load(bundle / names.MODEL_FILE, load_external_data=False).graph.node)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="hub id, folder or .gguf file")
    parser.add_argument("folder", type=Path, help="where the bundles are kept")
    parser.add_argument("--weights", choices=["int4", "int8", "float32"], default="int4")
    parser.add_argument("--depth", type=int, default=128, help="tokens of the prompt [128]")
    parser.add_argument("--gen", type=int, default=48, help="decode steps [48]")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each bundle [5]")
    parser.add_argument("--threads", type=int, default=None, help="threads [one per core]")
    parser.add_argument("--prepare", action="store_true", help="make the bundles and end")
    arguments = parser.parse_args()

    bundles = prepare(arguments.model, arguments.folder, arguments.weights)
    if arguments.prepare:
        return
    measurements = [Measurement.open(path, threads=arguments.threads) for path in bundles.values()]
    (samples,) = compare(
        measurements, [arguments.depth], gen=arguments.gen, batch=1, repeats=arguments.rounds
    )
    best = {
        name: (min(run.prefill_s for run in runs), min(run.decode_s for run in runs))
        for name, runs in zip(bundles, samples, strict=True)
    }
    print("| without | nodes | prefill ms | ratio | decode ms | ratio |")
    print("|---|---|---|---|---|---|")
    for name, (prefill, decode) in best.items():
        print(
            f"| {'-' if name == ALL else name} | {num_nodes(bundles[name])} | {1e3 * prefill:.1f} "
            f"| {prefill / best[ALL][0]:.2f} | {1e3 * decode / arguments.gen:.2f} "
            f"| {decode / best[ALL][1]:.2f} |"
        )


if __name__ == "__main__":
    main()
