"""Open one bundle in other programs, and compare their greedy tokens with kvconv's.

    python interop.py BUNDLE [--genai PYTHON] [--optimum PYTHON]

PYTHON is the interpreter of an environment with onnxruntime-genai, or with optimum-onnx. Prints a
line for each: `same`, the first token that differs, or why the program cannot run the bundle.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

PROMPTS = ([504, 3575, 282, 4649, 314], [1, *list(range(100, 160))], [42])
NEW_TOKENS = 24
GENAI = """
import json, sys, numpy, onnxruntime_genai
folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = onnxruntime_genai.Model(folder)
for ids in prompts:
    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(numpy.array([ids], numpy.int32))
    found = []
    while not generator.is_done():
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    print("tokens", json.dumps(found))
"""
OPTIMUM = """
import json, sys, onnxruntime, torch
from optimum.onnxruntime import ORTModelForCausalLM
folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(folder + "/libkvconv_ops.so")
model = ORTModelForCausalLM.from_pretrained(folder, session_options=options, use_io_binding=IO)
for ids in prompts:
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    options = dict(do_sample=False, max_new_tokens=count, pad_token_id=0)
    found = model.generate(input_ids=prompt, attention_mask=mask, **options)
    print("tokens", json.dumps(found[0, len(ids) :].tolist()))
"""


def kvconv_tokens(bundle: Path) -> list[list[int]]:
    """Return kvconv's own tokens."""
    from kvconv.runtime import Generator, SamplingParams

    generator, params = Generator.open(bundle), SamplingParams(max_new_tokens=NEW_TOKENS)
    return [[event.token_id for event in generator.generate([p], params)] for p in PROMPTS]


def compare(python: str, code: str, bundle: Path, expected: list[list[int]]) -> str:
    """Run a program in its environment and say what came out."""
    arguments = [python, "-c", code, str(bundle), json.dumps(PROMPTS), str(NEW_TOKENS)]
    result = subprocess.run(arguments, capture_output=True, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("tokens ")]
    if result.returncode != 0 or len(lines) != len(expected):
        reasons = [line for line in result.stderr.splitlines() if "Error" in line]
        return f"cannot: {(reasons or ['no tokens'])[-1][:300]}"
    for prompt, (line, wanted) in enumerate(zip(lines, expected, strict=True)):
        found = json.loads(line.removeprefix("tokens "))
        if found != wanted:
            places = [
                i for i, pair in enumerate(zip(found, wanted, strict=False)) if len(set(pair)) > 1
            ]
            return (
                f"differs: prompt {prompt}, token {(places or [min(len(found), len(wanted))])[0]}"
            )
    return "same"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--genai", help="interpreter of its environment")
    parser.add_argument("--optimum", help="interpreter of its environment")
    options = parser.parse_args()
    if not (options.genai or options.optimum):
        sys.exit("Give --genai or --optimum, the interpreter of an environment that has it.")
    tokens = kvconv_tokens(options.bundle)
    if options.genai:
        print("onnxruntime-genai      ", compare(options.genai, GENAI, options.bundle, tokens))
    if options.optimum:
        for io_binding in (False, True):
            code = OPTIMUM.replace("IO)", f"{io_binding})", 1)
            what = "with I/O binding" if io_binding else "no I/O binding  "
            print(f"optimum {what}", compare(options.optimum, code, options.bundle, tokens))
