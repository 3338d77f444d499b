"""Checks and measures kvconv's CUDA kernels on the GPU of this machine.

    python recipes/gpu_check/gpu_check.py [--json FILE] [--bundle CUDA_BUNDLE [--gqa GQA_BUNDLE]]

Installs nothing. Takes kvconv, PyTorch built for CUDA, and Triton, which comes with it. Compiles
the kernels for this GPU, compares what the op gives with float64 arithmetic, and measures it
against torch's flash attention and the device's own copies. With --bundle, and onnxruntime-gpu
installed, measures whole decode steps as well, with and without CUDA graph. Exit code 1: wrong
numbers, or the
check could not be made; goals that are missed are in the table alone.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from goals import GRAPH_GOAL, Result, as_json, table

from kvconv.errors import KvconvError


def main() -> int:
    """Check, measure, print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    parser.add_argument("--bundle", type=Path, help="a bundle exported with --provider cuda")
    parser.add_argument("--gqa", type=Path, help="the same model with --attention gqa")
    arguments = parser.parse_args()
    reason = why_not_here()
    if reason is not None:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 1
    import measure
    import numerics
    import torch

    notes: list[str] = []
    name, gpu = numerics.this_gpu()
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, compute capability {name}, kernels of {gpu}", flush=True)
    try:
        kernels = numerics.compile_for(gpu, [*numerics.CASES, *measure.cases()])
        wrong = numerics.check(kernels)
        results = measure.measure(kernels, properties.L2_cache_size)
    except KvconvError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    results += steps(arguments.bundle, arguments.gqa, notes)
    machine = {
        "gpu": properties.name, "compute_capability": name, "kernels": gpu,
        "torch": torch.__version__, "cuda": torch.version.cuda, "wrong": wrong,
    }  # fmt: skip
    arguments.json.write_text(as_json(machine, results, notes), encoding="utf-8")
    print(table(results))
    for note in notes:
        print(f"not checked: {note}")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print(f"{len(numerics.CASES)} attentions compared, {len(wrong)} wrong; {arguments.json}")
    return 1 if wrong else 0


def why_not_here() -> str | None:
    """Return a sentence saying what is missing here; None where everything is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "no NVIDIA driver was found (libcuda.so.1). Run this on a machine with an NVIDIA GPU; "
            "`make test-kernels` is what can be tested without one."
        )
    try:
        import torch
    except ModuleNotFoundError:
        return "PyTorch is not installed. Install the build for CUDA: pip install torch"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for the CPU. Install the build for CUDA."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU that it can use; see nvidia-smi."
    return None


def steps(bundle: Path | None, gqa: Path | None, notes: list[str]) -> list[Result]:
    """Measure whole decode steps of bundles, each in a process of its own.

    Args:
        bundle: With kvconv's op; None to leave this out.
        gqa: The same model with ONNX Runtime's; may be None.
        notes: What could not be measured is added, and why.
    """
    if bundle is None:
        notes.append("whole decode steps: no --bundle was given")
        return []
    rates: dict[str, float] = {}
    for what, path, options in (
        ("with CUDA graph", bundle, ["--cuda-graph"]),
        ("without CUDA graph", bundle, ["--no-cuda-graph"]),
        ("GroupQueryAttention", gqa, ["--no-cuda-graph"]),
    ):
        if path is None:
            notes.append("GroupQueryAttention: no --gqa was given")
            continue
        rate = decode_rate(path, options)
        if isinstance(rate, str):
            notes.append(f"{what}: {rate}")
        else:
            rates[what] = rate
    results = []
    plain = rates.get("without CUDA graph")
    for what, rate in rates.items():
        ratio = None if plain is None or rate == plain else rate / plain
        goal = GRAPH_GOAL if what == "with CUDA graph" else None
        versus = "" if ratio is None else "without CUDA graph"
        results.append(Result(f"decode step, {what}", rate, "tokens/s", versus, ratio, goal))
    return results


def decode_rate(bundle: Path, options: list[str]) -> float | str:
    """Return the tokens per second that a bundle decodes at depth 512, or why there are none."""
    command = [
        str(Path(sys.executable).with_name("kvconv")), "bench", str(bundle), "--provider", "cuda",
        "--depths", "512", "--gen", "128", "--json", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr.strip().rpartition("\n")[2]
    points: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return next(float(point["tokens_per_s"]) for point in points if point["what"] == "decode")


if __name__ == "__main__":
    sys.exit(main())
