"""What the machine allows: reading and copying memory, and float32 matrix products.

Each roof is measured once per call, so that callers can let it take turns with what they compare
it to.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvconv.bench.session import open_session

_BYTES = 512 * 2**20
_PLACES = 8
"""That a thread reads side by side: a processor looks ahead within a page only, so one place at a
time leaves it with half of the requests that it can have under way."""
_STRETCH = 256
"""Floats that are read at each place in turn: so few that BLAS needs no memory of its own, for
which threads would wait."""
_SIZE = 2048


class MemoryRoof:
    """Memory far larger than caches, split over threads.

    Args:
        threads: Threads, >= 1.
        num_bytes: Size of the memory that is read; copying takes as much again, read and written
            by halves.
    """

    def __init__(self, threads: int, num_bytes: int = _BYTES) -> None:
        self._memory = np.ones(num_bytes // 4, np.float32)
        self._ones = np.ones(_STRETCH, np.float32)
        size = self._memory.size // threads // (_PLACES * _STRETCH) * _PLACES * _STRETCH
        self._parts = [
            self._memory[i * size : (i + 1) * size]
            .reshape(_PLACES, -1, _STRETCH)
            .transpose(1, 0, 2)
            for i in range(threads)
        ]
        half = self._memory.size // 2
        sources = np.array_split(self._memory[:half], threads)
        targets = np.array_split(self._memory[half : 2 * half], threads)
        self._copies = list(zip(targets, sources, strict=True))
        self._pool = ThreadPoolExecutor(threads)

    def read(self) -> float:
        """Sum each thread's part, stretch by stretch; return bytes read per second."""
        started = time.perf_counter()
        list(self._pool.map(lambda part: np.matmul(part, self._ones), self._parts))
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - started)

    def copy(self) -> float:
        """Copy one half into the other; return bytes read and written per second."""
        started = time.perf_counter()
        list(self._pool.map(lambda pair: np.copyto(*pair), self._copies))
        return self._memory.nbytes / (time.perf_counter() - started)


class OnnxRuntimeMatMul:
    """ONNX Runtime's MatMul of two float32 matrices, the second a weight.

    Args:
        threads: Threads, >= 1.
        size: Rows and columns of both.
    """

    def __init__(self, threads: int, size: int = _SIZE) -> None:
        from onnx import TensorProto, helper, numpy_helper

        rng = np.random.default_rng(0)
        self._flops = 2 * size**3
        self._left = rng.standard_normal((size, size), np.float32)
        weight = numpy_helper.from_array(rng.standard_normal((size, size), np.float32), "weight")
        value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size, size]) for n in "xy"]
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "weight"], ["y"])],
            "matmul", value[:1], value[1:], [weight],
        )  # fmt: skip
        self._session = open_session(graph, threads=threads)

    def run(self) -> float:
        """Multiply once; return floating-point operations per second."""
        started = time.perf_counter()
        self._session.run(None, {"x": self._left})
        return self._flops / (time.perf_counter() - started)


class TorchMatMul:
    """PyTorch's product of two float32 matrices.

    Args:
        threads: Threads, >= 1; set for PyTorch as a whole.
        size: Rows and columns of both.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """

    def __init__(self, threads: int, size: int = _SIZE) -> None:
        import torch

        torch.set_num_threads(threads)
        self._torch: Any = torch
        self._flops = 2 * size**3
        self._operands = [torch.randn(size, size) for _ in range(2)]
        self._result = torch.empty(size, size)

    def run(self) -> float:
        """Multiply once; return floating-point operations per second."""
        started = time.perf_counter()
        self._torch.mm(*self._operands, out=self._result)
        return self._flops / (time.perf_counter() - started)
