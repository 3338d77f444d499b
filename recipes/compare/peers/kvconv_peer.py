"""A kvconv bundle, through `Generator.generate`: ids, sampling and text, as `kvconv run` does it.

Usage: python kvconv_peer.py BUNDLE THREADS
"""

import dataclasses
import sys
from typing import Any

import numpy as np
from protocol import Clock, Run, serve, set_threads

BUNDLE, THREADS = sys.argv[1], int(sys.argv[2])


def load() -> tuple[Run, dict[str, Any]]:
    """Open the bundle."""
    set_threads(THREADS)
    from kvconv import __version__
    from kvconv.bench import Measurement
    from kvconv.runtime import SamplingParams

    generator = Measurement.open(BUNDLE, threads=THREADS).generator
    manifest = generator.session.manifest

    def run(ids: np.ndarray, gen: int) -> Clock:
        clock = Clock()
        new_id = 0
        params = SamplingParams(max_new_tokens=gen + 1)
        for event in generator.generate(ids.tolist(), params):
            new_id = event.token_id if event.row == 0 else new_id
            if event.row == len(ids) - 1:
                clock.tick(new_id)
        return clock

    return run, {
        "version": __version__,
        "weights": manifest.weights_dtype,
        "attention": manifest.attention,
        "cache": manifest.cache_layers[0].dtype,
        **dataclasses.asdict(manifest.source),
    }


serve(load)
