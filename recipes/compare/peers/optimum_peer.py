"""optimum-onnx: ORTModelForCausalLM.generate with I/O binding, float32.

Usage: python optimum_peer.py FOLDER THREADS
"""

import sys
from typing import Any

from protocol import Run, serve, set_threads

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])


def load() -> tuple[Run, dict[str, Any]]:
    """Open the exported folder."""
    set_threads(THREADS)
    import importlib.metadata

    import onnxruntime
    import torch
    from generate_loop import generate_run
    from optimum.onnxruntime import ORTModelForCausalLM

    torch.set_num_threads(THREADS)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    model = ORTModelForCausalLM.from_pretrained(
        FOLDER, session_options=options, use_cache=True, use_io_binding=True
    )
    version = importlib.metadata.version("optimum-onnx")
    return generate_run(model), {
        "version": f"optimum-onnx {version}, onnxruntime {onnxruntime.__version__}",
        "weights": "float32",
        "cache": "float32",
    }


serve(load)
