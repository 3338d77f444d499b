"""Decode of one bundle from Python and from C, in turns, and what a step of C takes of its own.

    python native.py BUNDLE [--depth 128] [--tokens 64] [--rounds 5] [--threads 2]

Both run the same graph in the same ONNX Runtime with the same greedy choice; text is not made. One
process opens both, with a pool of threads each: threads sleep while they wait, so that those of one
do not take the cores of the other.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvconv import custom_ops
from kvconv.runtime import Bundle, Session
from kvconv.runtime.sampling import Sampler, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from kvconv_c import Library


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    for name, value in (("depth", 128), ("tokens", 64), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    tokens, capacity = options.tokens, options.depth + options.tokens + 1
    session = Session(Bundle.open(options.bundle), threads=options.threads, spin=False)
    library = Library(custom_ops.library_path().parent / "libkvconv_runtime.so")
    model = library.open(options.bundle, threads=options.threads, no_spin=1)
    vocab_size = session.manifest.vocab_size
    prompt = np.random.default_rng(0).integers(10, vocab_size, options.depth).tolist()
    cache, generator = session.new_cache(1, capacity), model.generator(capacity)
    mask, sampler = np.ones((1, capacity), np.int64), Sampler(SamplingParams())
    python_ms, native_ms, own_us = [], [], []
    for _ in range(options.rounds):
        cache.reset()
        logits = session.run(cache, [prompt])
        step = session.decode_step(cache, mask, logits)
        ids = []
        start = time.perf_counter()
        for _ in range(tokens):
            ids.append(sampler(prompt, logits[0, -1]))
            step.run(ids[-1:])
        python_ms.append((time.perf_counter() - start) * 1e3 / tokens)
        generator.rewind(0)
        generator.append(prompt)
        found = [generator.next()[0]]
        before, start = generator.stats, time.perf_counter()
        for _ in range(tokens):
            found.append(generator.next()[0])
        native_ms.append((time.perf_counter() - start) * 1e3 / tokens)
        after = generator.stats
        inside = after.onnxruntime_ns - before.onnxruntime_ns
        own_us.append((after.decode_ns - before.decode_ns - inside) / 1e3 / tokens)
        if found[:tokens] != ids:
            sys.exit("The two gave different tokens.")
    python, native = statistics.median(python_ms), statistics.median(native_ms)
    print(f"python {python:.2f} ms a token, native {native:.2f} ms: {python / native:.3f} times")
    print(f"native's own work {statistics.median(own_us):.0f} us a step")


main()
