"""A bundle of kvconv in another program: greedy ids.

Usage: python interop_peer.py genai|optimum BUNDLE < {"prompts": [[id, ...], ...], "tokens": N}

Prints a JSON list, the new ids of each prompt.
"""

import json
import sys
from pathlib import Path


def genai(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Generate as genai_config.json in the folder says."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    results = []
    for prompt in prompts:
        length = len(prompt) + tokens
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompt)
        ids = []
        for _ in range(tokens):
            generator.generate_next_token()
            ids.append(int(generator.get_next_tokens()[0]))
        results.append(ids)
    return results


def optimum(folder: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Generate with ORTModelForCausalLM and the op library in the folder."""
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(folder / "libkvconv_ops.so"))
    model = ORTModelForCausalLM.from_pretrained(
        folder, session_options=options, use_io_binding=False
    )
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
        )
        results.append(found[0, len(prompt) :].tolist())
    return results


if __name__ == "__main__":
    request = json.load(sys.stdin)
    run = {"genai": genai, "optimum": optimum}[sys.argv[1]]
    json.dump(run(Path(sys.argv[2]), request["prompts"], request["tokens"]), sys.stdout)
