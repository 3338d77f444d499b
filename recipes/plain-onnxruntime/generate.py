"""A bundle with nothing but onnxruntime, numpy and the op library: the graph's contract, by hand.

    python generate.py BUNDLE N ID...

prints N greedy token ids behind the given ones. The cache is shared: past and present are one
memory of full capacity, so a run copies nothing. kvconv is not imported; the library lies in the
bundle. ARCHITECTURE.md, "The graph contract", says what each input means.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

TYPES = {
    "tensor(float)": (np.float32, 1),
    "tensor(float16)": (np.float16, 10),
    "tensor(bfloat16)": (np.uint16, 16),  # numpy has none; the bits pass through
    "tensor(int8)": (np.int8, 3),
    "tensor(uint8)": (np.uint8, 2),
}


def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens."""
    manifest = json.loads((folder / "kvconv.json").read_text())
    capacity = len(prompt) + count
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(folder / "libkvconv_ops.so"))
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    binding = session.io_binding()
    kept = []  # the binding holds addresses: whoever owns the memory must live

    def value(array: np.ndarray, element_type: int) -> onnxruntime.OrtValue:
        kept.append(array)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type)

    # 1. The cache: one buffer per tensor, bound as past and as present.
    for entry in session.get_inputs():
        if not entry.name.startswith("past_key_values."):
            continue
        layer = manifest["cache_layers"][int(entry.name.split(".")[1])]
        slots = min(layer["capacity"] or capacity, capacity)  # a ring holds its newest tokens
        dtype, element_type = TYPES[entry.type]
        cached = value(np.zeros((1, entry.shape[1], slots, entry.shape[3]), dtype), element_type)
        binding.bind_ortvalue_input(entry.name, cached)
        present = entry.name.replace("past_key_values.", "present.")
        binding.bind_ortvalue_output(present, cached)
    names = {entry.name for entry in session.get_inputs()}
    # 2. Logits of the last token alone. bind_cpu_input does not find this input.
    logits = np.empty((1, 1, manifest["vocab_size"]), np.float32)
    binding.bind_ortvalue_output("logits", value(logits, 1))
    keep = onnxruntime.OrtValue.ortvalue_from_numpy(np.array(1, np.int64))
    binding.bind_ortvalue_input("num_logits_to_keep", keep)
    tokens, new, past = list(prompt), prompt, 0
    while len(tokens) < capacity:
        # 3. A run: the new ids, their positions, and a mask as wide as the cache is then full.
        total = past + len(new)
        binding.bind_cpu_input("input_ids", np.array([new], np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, total), np.int64))
        if "position_ids" in names:
            binding.bind_cpu_input("position_ids", np.arange(past, total)[None])
        if "past_sequence_length" in names:  # rings cannot tell it from the mask
            binding.bind_cpu_input("past_sequence_length", np.array([past], np.int32))
        session.run_with_iobinding(binding)
        past, new = total, [int(logits.argmax())]
        tokens += new
        if new[0] in manifest["eos_token_ids"]:
            break
    return tokens[len(prompt) :]


if __name__ == "__main__":
    bundle, count, *ids = sys.argv[1:]
    print(*generate(Path(bundle), list(map(int, ids)), int(count)))
