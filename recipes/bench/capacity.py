"""Measure that a larger KV-cache buffer costs a decode step nothing.

Usage: python recipes/bench/capacity.py BUNDLE [--length 128] [--capacities 256,8192] [--steps 24]

Both caches are filled with the same prompt and take turns, a few steps each, in one process, so
that a busy machine slows both. Prints the median milliseconds a step of each, and the ratio.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from kvconv.runtime import Bundle, KVCache, Session


def time_steps(session: Session, cache: KVCache, token: np.ndarray, steps: int) -> list[float]:
    """Return the seconds of each of some decode steps, always at the same length."""
    seconds = []
    length = cache.length
    for _ in range(steps):
        start = time.perf_counter()
        session.run(cache, token)
        seconds.append(time.perf_counter() - start)
        cache.rewind(length)
    return seconds


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--length", type=int, default=128, help="tokens in the cache [128]")
    parser.add_argument("--capacities", default="256,8192", help="two capacities [256,8192]")
    parser.add_argument("--steps", type=int, default=24, help="steps per turn [24]")
    parser.add_argument("--turns", type=int, default=10, help="turns [10]")
    parser.add_argument("--threads", type=int, default=2, help="threads [2]")
    arguments = parser.parse_args()

    session = Session(Bundle.open(arguments.bundle), threads=arguments.threads)
    prompt = np.random.default_rng(0).integers(100, 1000, (1, arguments.length))
    token = prompt[:, :1]
    capacities = [int(text) for text in arguments.capacities.split(",")]
    caches = [session.new_cache(1, capacity) for capacity in capacities]
    for cache in caches:
        session.run(cache, prompt)
        time_steps(session, cache, token, 3)
    seconds: list[list[float]] = [[] for _ in caches]
    for _ in range(arguments.turns):
        for index, cache in enumerate(caches):
            seconds[index] += time_steps(session, cache, token, arguments.steps)
    medians = [statistics.median(times) for times in seconds]
    for capacity, median in zip(capacities, medians, strict=True):
        print(f"capacity {capacity:6d}: {1e3 * median:.2f} ms a step at length {arguments.length}")
    print(f"ratio {medians[-1] / medians[0]:.3f}")


if __name__ == "__main__":
    main()
