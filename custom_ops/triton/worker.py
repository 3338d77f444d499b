"""Compiles kernels in processes of their own: several at once, each with Triton's environment.

`python -m kvconv.custom_ops.triton.worker` is such a process; it reads variants and writes what
became of them, as pickles. They are no children of multiprocessing, which would run the program's
main module again.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from kvconv.custom_ops.triton.compile import (
    Compiled,
    compile_variant,
    require_triton,
    set_environment,
)
from kvconv.custom_ops.triton.variants import Variant
from kvconv.errors import ExportError, KvconvError


def compile_variants(
    variants: Iterable[Variant], *, processes: int | None = None
) -> list[Compiled]:
    """Compile kernels, in as many processes as there are CPUs for.

    Args:
        variants: What to compile.
        processes: How many processes; None for the CPUs that this one may use.

    Raises:
        MissingDependencyError: Triton is not installed.
        ExportError: One does not compile, or does not fit its GPU.
    """
    require_triton()
    # Kinds and sizes differ in time more than GPUs do: the long ones first.
    todo = sorted(variants, key=lambda variant: (variant.kind in (1, 4), variant))
    count = min(processes or len(os.sched_getaffinity(0)), len(todo))
    workers: SimpleQueue[_Worker] = SimpleQueue()
    started = [_Worker() for _ in range(count)]

    def run(variant: Variant) -> Compiled:
        worker = workers.get()
        try:
            return worker.compile(variant)
        finally:
            workers.put(worker)

    for worker in started:
        workers.put(worker)
    try:
        with ThreadPoolExecutor(max_workers=max(count, 1)) as threads:
            futures = [threads.submit(run, variant) for variant in todo]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                for worker in started:
                    worker.kill()
                raise
    finally:
        for worker in started:
            worker.close()


class _Worker:
    """A process that compiles one kernel at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def compile(self, variant: Variant) -> Compiled:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(variant, self._process.stdin)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)
        except (OSError, EOFError) as error:
            raise ExportError(
                f"The process that compiles kernels ended at {variant}, with exit code "
                f"{self._process.wait()}; the machine may have too little memory."
            ) from error
        if isinstance(result, Exception):
            raise result
        compiled: Compiled = result
        return compiled

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _serve() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not get between the answers
    set_environment()
    while True:
        try:
            variant = pickle.load(requests)
        except EOFError:
            return
        result: Compiled | KvconvError
        try:
            result = compile_variant(variant)
        except KvconvError as error:
            result = ExportError(str(error))
        pickle.dump(result, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
