"""openvino-genai's LLMPipeline on a GGUF file with float16 weights, computing in float32.

Usage: python openvino_peer.py FILE.gguf THREADS

Without INFERENCE_PRECISION_HINT it computes in bfloat16 on CPUs that have it (AMX). Prefix
caching is off, or the second run of a prompt would be answered from the cache.
"""

import sys
from typing import Any

import numpy as np
from protocol import Clock, Run, serve, set_threads

FILE, THREADS = sys.argv[1], int(sys.argv[2])
PRECISION = "f32"
BATCHED_TOKENS = 8192


def load() -> tuple[Run, dict[str, Any]]:
    """Read the GGUF file."""
    set_threads(THREADS)
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    pipeline = openvino_genai.LLMPipeline(
        FILE,
        "CPU",
        INFERENCE_NUM_THREADS=THREADS,
        INFERENCE_PRECISION_HINT=PRECISION,
        scheduler_config=scheduler,
    )

    class Ticks(openvino_genai.StreamerBase):
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock = clock

        def write(self, token: Any) -> Any:
            for token_id in [token] if isinstance(token, int) else token:
                self.clock.tick(token_id)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def run(ids: np.ndarray, gen: int) -> Clock:
        if len(ids) > 1:
            raise NotImplementedError("its streamer, the clock here, is for batch 1 only")
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = gen + 1
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        clock = Clock()
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        pipeline.generate(inputs, config, Ticks(clock))
        return clock

    return run, {
        "version": openvino_genai.__version__,
        "weights": "float16",
        "compute": PRECISION,
        "cache": "its default",
    }


serve(load)
