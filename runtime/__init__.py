"""Generate text from a bundle with numpy and ONNX Runtime; torch is never imported.

    from kvconv.runtime import Generator, SamplingParams

    generator = Generator.open("smollm2")
    for piece in generator.stream("What is the capital of France?", chat_template=True):
        print(piece, end="", flush=True)

`Conversation` keeps its cache between turns. Below `Generator` are `Bundle` (the files), `Session`
(the model) and `KVCache` (the memory).
"""

from kvconv.runtime.batches import plan_batches
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.conversation import Conversation
from kvconv.runtime.generator import Generator
from kvconv.runtime.kv_cache import KVCache
from kvconv.runtime.row import GenerationEvent
from kvconv.runtime.sampling import SamplingParams
from kvconv.runtime.session import Session

__all__ = [
    "Bundle",
    "Conversation",
    "GenerationEvent",
    "Generator",
    "KVCache",
    "SamplingParams",
    "Session",
    "plan_batches",
]
