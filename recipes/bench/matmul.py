"""Measure kvconv::MatMulNBits against ONNX Runtime's MatMulNBits and its float32 MatMul.

Usage: python recipes/bench/matmul.py [--shapes 960x576,...] [--rows 1,8,128,512,2048] [--bits 4]
       [--block-size 32] [--accuracy-level 2] [--zero-points] [--threads 2] [--seconds 0.4]

Shapes are N x K: outputs x inputs; the defaults are SmolLM2-135M's, packed. Each graph holds
several such products with weights of their own, so that weights come from beyond the processor's
first caches, as they do in a model. The three take turns in one process; the medians are compared.
ONNX Runtime's operator has no accuracy level 2 and takes 4 then: 8-bit activations, its fastest.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from kvconv import names
from kvconv.bench.session import open_session

SHAPES = "960x576,576x576,3072x576,576x1536,49152x576"
MAX_BYTES = 160_000_000  # of float32 weights in one graph
MAX_COPIES = 64

Tensors = Mapping[str, npt.NDArray]


def copies_of(outputs: int, inputs: int, rows: int) -> int:
    """Return how many products a graph holds; one is enough where arithmetic takes the time."""
    return max(1, min(MAX_COPIES if rows <= 16 else 2, MAX_BYTES // (4 * outputs * inputs)))


def make_session(
    op: str,
    domain: str,
    attributes: Mapping[str, int],
    weights: list[Tensors],
    threads: int,
) -> onnxruntime.InferenceSession:
    """Build a session of one node per set of weights; all read A and write an output each."""
    graph = helper.make_graph(
        [
            helper.make_node(
                op,
                ["A", *(f"{name}_{i}" if name else "" for name in tensors)],
                [f"Y_{i}"],
                domain=domain,
                **attributes,
            )
            for i, tensors in enumerate(weights)
        ],
        "products",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, [None, None])],
        [
            helper.make_tensor_value_info(f"Y_{i}", TensorProto.FLOAT, [None, None])
            for i in range(len(weights))
        ],
        [
            numpy_helper.from_array(array, f"{name}_{i}")
            for i, tensors in enumerate(weights)
            for name, array in tensors.items()
            if name
        ],
    )
    return open_session(graph, threads=threads)


def make_weights(arguments: argparse.Namespace, outputs: int, inputs: int) -> list[Tensors]:
    """Return one product's random weights for kvconv's op, ONNX Runtime's, and MatMul."""
    rng = np.random.default_rng(0)
    blocks = -(-inputs // arguments.block_size)
    block_bytes = arguments.block_size * arguments.bits // 8
    groups = -(-outputs // 16)
    data = rng.integers(0, 256, groups * 16 * blocks * block_bytes).astype(np.uint8)
    scales = rng.uniform(0.01, 0.02, groups * 16 * blocks).astype(np.float32)
    ours: dict[str, npt.NDArray] = {
        "B": data.reshape(groups, blocks * block_bytes // 4, 16, 4),
        "scales": scales.reshape(groups, blocks, 16).astype(np.float16),
    }
    theirs: dict[str, npt.NDArray] = {
        "B": data.reshape(-1, blocks, block_bytes)[:outputs],
        "scales": scales[: outputs * blocks],
    }
    if arguments.zero_points:
        zeros = rng.integers(0, 256, outputs * -(-blocks * arguments.bits // 8)).astype(np.uint8)
        ours["zero_points"] = np.full_like(ours["scales"], 1 << (arguments.bits - 1))
        theirs["zero_points"] = zeros
    dense = rng.standard_normal((inputs, outputs)).astype(np.float32)
    return [ours, theirs, {"B": dense}]


def make_runs(
    arguments: argparse.Namespace, outputs: int, inputs: int, rows: int
) -> tuple[list[Callable[[], None]], int]:
    """Return one run of each of the three graphs, and how many products each holds."""
    copies = copies_of(outputs, inputs, rows)
    a = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    attributes = {
        "K": inputs,
        "N": outputs,
        "bits": arguments.bits,
        "block_size": arguments.block_size,
        "accuracy_level": arguments.accuracy_level,
    }
    their_level = 1 if arguments.accuracy_level == 1 else 4
    runs = []
    kinds = [
        ("MatMulNBits", names.OP_DOMAIN, attributes),
        ("MatMulNBits", names.ORT_DOMAIN, attributes | {"accuracy_level": their_level}),
        ("MatMul", "", {}),
    ]
    for (op, domain, given), tensors in zip(
        kinds, make_weights(arguments, outputs, inputs), strict=True
    ):
        session = make_session(op, domain, given, [tensors] * copies, arguments.threads)
        binding = session.io_binding()
        binding.bind_cpu_input("A", a)
        for i in range(copies):
            value = onnxruntime.OrtValue.ortvalue_from_shape_and_type((rows, outputs), np.float32)
            binding.bind_ortvalue_output(f"Y_{i}", value)
        runs.append(lambda session=session, binding=binding: session.run_with_iobinding(binding))
    return runs, copies


def time_in_turns(runs: list[Callable[[], None]], seconds: float) -> list[float]:
    """Return each run's median seconds; the runs take turns for about `seconds` each."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    while sum(map(sum, times)) < seconds * len(runs) or len(times[0]) < 3:
        for run, measured in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in times]


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"N x K [{SHAPES}]")
    parser.add_argument("--rows", default="1,8,128,512,2048", help="rows of A [1,8,128,512,2048]")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8), help="[4]")
    parser.add_argument("--block-size", type=int, default=32, help="[32]")
    parser.add_argument("--accuracy-level", type=int, default=2, choices=(1, 2, 4), help="[2]")
    parser.add_argument("--zero-points", action="store_true", help="weights are not symmetric")
    parser.add_argument("--threads", type=int, default=2, help="[2]")
    parser.add_argument("--seconds", type=float, default=0.4, help="per measurement [0.4]")
    arguments = parser.parse_args()

    print("    N x K          M   kvconv us    GB/s  GFLOP/s   ORT NBits us  x   MatMul us  x")
    for shape in arguments.shapes.split(","):
        outputs, inputs = (int(size) for size in shape.split("x"))
        ours = make_weights(arguments, outputs, inputs)[0]
        weight_bytes = sum(array.nbytes for array in ours.values())
        for rows in (int(text) for text in arguments.rows.split(",")):
            if rows * outputs > 100_000_000 // 4:
                continue  # logits of so many rows are never made
            runs, copies = make_runs(arguments, outputs, inputs, rows)
            seconds = [t / copies for t in time_in_turns(runs, arguments.seconds)]
            print(
                f"{outputs:6d} x {inputs:<5d} {rows:5d} {1e6 * seconds[0]:11.1f} "
                f"{weight_bytes / seconds[0] / 1e9:7.1f} "
                f"{2 * rows * outputs * inputs / seconds[0] / 1e9:8.0f} "
                f"{1e6 * seconds[1]:11.1f} {seconds[1] / seconds[0]:5.2f} "
                f"{1e6 * seconds[2]:11.1f} {seconds[2] / seconds[0]:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
