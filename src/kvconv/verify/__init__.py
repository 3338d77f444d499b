"""Verification: the shipped runtime against PyTorch, on the same token ids.

PyTorch goes first, while its model is in memory (`Verifier.reference`). The bundle is driven
afterwards (`Verifier.compare`), in a process of its own (`python -m kvconv.verify`): so both models
are never held at once, and the runtime is checked without PyTorch beside it. The checks:

1. whole prefill: the prompt in one run.
2. chunked prefill: the same prompt in runs of odd sizes.
3. decode: 16 tokens, one a run.
4. left-padded batch: prompts of unequal length in one batch, prefilled in chunks, then 4 tokens,
   against single runs. A flavour that takes no padding runs two sequences of equal length instead,
   and the result says so.
5. rewind and re-prompt: back to the middle of the prompt, then another continuation.

What a bundle has rounded and PyTorch has not is compared once, loosely: `float weights` and `float
cache`. With a quantised cache the checks above are against the bundle itself, in one run each.

The prompt crosses sliding windows twice where they are at most 1,024 tokens. Importing this
package imports neither PyTorch nor ONNX Runtime.
"""

from kvconv.verify.logits import Limits, compare_logits
from kvconv.verify.reference import Continuation, Reference, StoredReference
from kvconv.verify.verifier import Verifier, record, require_same_model

__all__ = [
    "Continuation",
    "Limits",
    "Reference",
    "StoredReference",
    "Verifier",
    "compare_logits",
    "record",
    "require_same_model",
]
