"""llama.cpp through llama-cpp-python's low level, so that batches work: float16 cache.

Usage: python llamacpp_peer.py FILE.gguf THREADS FLASH_ATTENTION(on|off) EXTRA_BUFFERS(on|off)

Extra buffers hold weights repacked for the CPU, for AMX among others.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from protocol import Clock, Run, serve, set_threads

FILE, THREADS = sys.argv[1], int(sys.argv[2])
FLASH, EXTRA_BUFFERS = (text == "on" for text in sys.argv[3:5])
UBATCH = 512
SLOT_STEP = 256  # capacities of llama.cpp are multiples of it


def load() -> tuple[Run, dict[str, Any]]:
    """Load the GGUF file."""
    set_threads(THREADS)
    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = EXTRA_BUFFERS
    model = llama.llama_model_load_from_file(FILE.encode(), model_params)
    if not model:
        sys.exit(f"llama.cpp cannot load {FILE}")
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def new_context(slots: int, batch: int) -> Any:
        params = llama.llama_context_default_params()
        params.n_ctx = slots * batch
        params.n_batch = params.n_ubatch = UBATCH
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = THREADS
        params.type_k = params.type_v = llama.GGML_TYPE_F16
        params.flash_attn_type = int(FLASH)
        params.kv_unified = False
        context = llama.llama_init_from_model(model, params)
        if not context:
            raise MemoryError("llama_init_from_model failed")
        return context

    def feed(
        context: Any, buffer: Any, tokens: Sequence[int], start: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Run tokens at their positions; logits are wanted of each row's last one."""
        buffer.n_tokens = len(tokens)
        for i, (token, position, row) in enumerate(zip(tokens, start, rows, strict=True)):
            buffer.token[i], buffer.pos[i] = int(token), position
            buffer.n_seq_id[i], buffer.seq_id[i][0] = 1, row
            buffer.logits[i] = i + 1 == len(tokens) or rows[i + 1] != row
        status = llama.llama_decode(context, buffer)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def best(context: Any, index: int) -> int:
        logits = llama.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

    def run(ids: np.ndarray, gen: int) -> Clock:
        batch, length = ids.shape
        clock = Clock()
        context = new_context(-(-(length + gen + 1) // SLOT_STEP) * SLOT_STEP, batch)
        buffer = llama.llama_batch_init(max(UBATCH, batch), 0, 1)
        try:
            last = [0] * batch
            for row in range(batch):
                for begin in range(0, length, UBATCH):
                    chunk = ids[row, begin : begin + UBATCH]
                    positions = range(begin, begin + len(chunk))
                    feed(context, buffer, chunk, positions, [row] * len(chunk))
                last[row] = best(context, -1)
            clock.tick(last[0])
            for step in range(gen):
                feed(context, buffer, last, [length + step] * batch, range(batch))
                last = [best(context, row) for row in range(batch)]
                clock.tick(last[0])
            return clock
        finally:
            llama.llama_batch_free(buffer)
            llama.llama_free(context)

    run.keep = quiet  # type: ignore[attr-defined]  # llama.cpp calls it as long as it runs
    return run, {
        "version": llama.__version__,
        "flash_attention": FLASH,
        "extra_buffers": EXTRA_BUFFERS,
        "cache": "float16",
        "system": llama.llama_print_system_info().decode(),
    }


serve(load)
