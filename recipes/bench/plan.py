"""Measure how near `kvconv plan` comes to the memory that a run really takes.

Usage: python recipes/bench/plan.py BUNDLE... [--batch 1] [--context 2048] [--threads 2]

Each bundle runs in a process of its own: prompts of random tokens fill all but the last slots, then
some steps are decoded. Prints the planned total, the peak of resident memory, and their ratio; and
the planned bytes of the KV cache beside those of the buffers, which are equal.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvconv.manifest import read_manifest
from kvconv.memory import peak_rss_mb
from kvconv.plan import bundle_sizes, plan

_STEPS = 4


def measure(bundle: Path, batch: int, context: int, threads: int) -> None:
    """Fill a cache and print this process's peak in MB, and the bytes of the buffers."""
    from kvconv.runtime import Generator

    generator = Generator.open(bundle, threads=threads)
    session = generator.session
    cache = session.new_cache(batch, context)
    most = min(session.manifest.vocab_size, 30_000)
    ids = np.random.default_rng(0).integers(1000, most, (batch, context - _STEPS))
    mask = np.ones((batch, context), np.int64)
    step = session.decode_step(cache, mask, generator.prefill(cache, ids, mask))
    for _ in range(_STEPS):
        step.run([1000] * batch)
    print(peak_rss_mb(), cache.nbytes)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--batch", type=int, default=1, help="rows [1]")
    parser.add_argument("--context", type=int, default=2048, help="tokens per row [2048]")
    parser.add_argument("--threads", type=int, default=2, help="threads [2]")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batch, context = arguments.batch, arguments.context
    if arguments.measure:
        measure(arguments.bundles[0], batch, context, arguments.threads)
        return
    for bundle in arguments.bundles:
        planned = plan(bundle_sizes(read_manifest(bundle)), batch_size=batch, context=context)
        command = [sys.executable, __file__, str(bundle), "--measure", "--batch", str(batch)]
        command += ["--context", str(context), "--threads", str(arguments.threads)]
        words = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.split()
        peak, buffers = float(words[0]), int(words[1])
        total = planned.total / 1e6
        print(
            f"{bundle}: {batch} x {context} tokens, planned {total:.0f} MB, peak {peak:.0f} MB, "
            f"ratio {total / peak:.3f}; cache {planned.cache_bytes} planned, {buffers} allocated"
        )


if __name__ == "__main__":
    main()
