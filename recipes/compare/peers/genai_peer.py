"""onnxruntime-genai: its own generator loop on a folder of its model builder.

Usage: python genai_peer.py FOLDER THREADS
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Clock, Run, serve, set_threads

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])
# `max_length` sizes the shared KV buffer; models with a window fail below it.
LEAST_LENGTH = 640


def load() -> tuple[Run, dict[str, Any]]:
    """Open the built folder."""
    set_threads(THREADS)
    import onnxruntime_genai

    config = onnxruntime_genai.Config(FOLDER)
    threads = {"intra_op_num_threads": THREADS}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = onnxruntime_genai.Model(config)
    written = json.loads((Path(FOLDER) / "genai_config.json").read_text())

    def run(ids: np.ndarray, gen: int) -> Clock:
        batch, context = ids.shape
        length = max(context + gen + 1, LEAST_LENGTH)
        clock = Clock()
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False, batch_size=batch
        )
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(ids.astype(np.int32))
        for _ in range(gen + 1):
            generator.generate_next_token()
            clock.tick(generator.get_next_tokens()[0])
        return clock

    return run, {
        "version": onnxruntime_genai.__version__,
        "share_buffer": written["search"].get("past_present_share_buffer"),
        "session_options": written["model"]["decoder"].get("session_options"),
        "cache": "float32",
    }


serve(load)
