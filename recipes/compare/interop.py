"""Open one bundle in other programs and compare their greedy ids with kvconv's.

Usage: python recipes/compare/interop.py BUNDLE [--tokens 48] [--envs FOLDER]

BUNDLE: a flash bundle with float32 or float16 caches and without rings (`--no-ring`), which is what
onnxruntime-genai and optimum can drive. Each runs in an environment of its own, made the first time
(environments.py). Prints the prompts whose ids all agree; exit code 1 unless all do.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from environments import python_of

from kvconv.runtime import Generator, SamplingParams

HERE = Path(__file__).parent
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "The three laws of motion are",
    "1, 2, 3, 4,",
    "Water boils at",
    "In the year 1492",
    "My favourite recipe begins with",
    "The opposite of hot is",
    "Dear Sir or Madam,",
)


def main() -> int:
    """Print a line per program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--envs", type=Path, default=Path("compare-envs"))
    arguments = parser.parse_args()
    generator = Generator.open(arguments.bundle)
    prompts = [generator.encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(max_new_tokens=arguments.tokens)
    ends = generator.session.manifest.eos_token_ids
    wanted = [
        [e.token_id for e in generator.generate([ids], params) if e.token_id not in ends]
        for ids in prompts
    ]
    request = json.dumps({"prompts": prompts, "tokens": arguments.tokens})
    all_agree = True
    for program in ("genai", "optimum"):
        python = python_of(program, arguments.envs)
        command = [python, HERE / "peers/interop_peer.py", program, arguments.bundle.resolve()]
        done = subprocess.run(command, input=request, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{program}: failed: {done.stderr.strip().splitlines()[-1]}")
            all_agree = False
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        # kvconv ends at EOS, which the others were told not to choose.
        agree = sum(a[: len(b)] == b for a, b in zip(found, wanted, strict=True))
        print(f"{program}: {agree} of {len(prompts)} prompts agree in {arguments.tokens} ids")
        all_agree &= agree == len(prompts)
    return 0 if all_agree else 1


if __name__ == "__main__":
    sys.exit(main())
