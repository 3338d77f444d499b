"""transformers' `generate` on PyTorch: float32, sdpa attention.

Usage: python transformers_peer.py FOLDER THREADS
"""

import sys
from typing import Any

from protocol import Run, serve, set_threads

FOLDER, THREADS = sys.argv[1], int(sys.argv[2])


def load() -> tuple[Run, dict[str, Any]]:
    """Open the model's folder."""
    set_threads(THREADS)
    import torch
    import transformers
    from generate_loop import generate_run

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return generate_run(model), {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "weights": "float32",
        "cache": "float32",
    }


serve(load)
