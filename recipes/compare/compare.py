"""Run other programs that generate text, interleaved with kvconv, on the same model; print ratios.

Usage: python recipes/compare/compare.py MODEL.gguf --bundle BUNDLE [--bundle BUNDLE2 ...]
           [--peers kvconv,genai-int4,...] [--depths 128,2048] [--work FOLDER] [--out FILE.jsonl]

Every peer is a process of its own, in a virtual environment that is made the first time, with the
model loaded once. In each round every peer runs each depth once; a point is the best of all
rounds. `--prepare` only makes environments and models: do that first, for it takes long. All see
the same random ids, choose greedily and do not end at EOS; `ids agree` says how many first new ids
are those of the reference, the first peer that computes in float32.

A run splits: `--peers` and `--depths` take parts, and the lines of `--out` add up in `table.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from environments import python_of
from models import GENAI_KINDS, Models
from table import print_table

HERE = Path(__file__).parent
PEERS = {
    "kvconv": "each --bundle, in this environment",
    "transformers": "transformers 5 on PyTorch, float32, sdpa",
    **{kind: "onnxruntime-genai, " + " ".join(options) for kind, options in GENAI_KINDS.items()},
    "openvino": "openvino-genai, float16 weights, float32 compute",
    "optimum": "optimum-onnx, float32, I/O binding",
    "llamacpp": "llama.cpp, the GGUF file as it is, flash attention off",
    "llamacpp-fa": "llama.cpp, the GGUF file as it is, flash attention on",
}
_SETTLE_S = 0.3  # OpenMP threads spin for 0.2 s after their work
_FIRST_IDS = 12
_LAST_WORDS_BYTES = 2000


class Peer:
    """A running driver.

    Args:
        name: How results call it.
        command: Its interpreter, driver and arguments.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        # A file: libraries print as much as they like, and a pipe that nobody reads would fill.
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.settings = self._read()["settings"]

    def run(self, ids: np.ndarray, gen: int) -> dict[str, Any]:
        """Return one sample, or an `error`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids.tolist(), "gen": gen}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the driver."""
        self._process.communicate(timeout=30)
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(size - _LAST_WORDS_BYTES, 0))
            errors = self._errors.read().decode(errors="replace")
            sys.exit(f"{self.name} ended with {self._process.returncode}: {errors}")
        document: dict[str, Any] = json.loads(line)
        return document


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Make what the chosen peers need, and return each one's name and command."""
    name = arguments.model.name.partition(".")[0]
    models = Models(arguments.model, arguments.work / "models", arguments.envs, name)
    found: dict[str, list[str]] = {}

    def add(label: str, python: Path | str, driver: str, path: Path, *more: str) -> None:
        script = HERE / "peers" / f"{driver}_peer.py"
        found[label] = [str(python), str(script), str(path), str(arguments.threads), *more]

    for peer in arguments.peers:
        if peer == "kvconv":
            for bundle in arguments.bundle:
                add(f"kvconv {bundle.name}", sys.executable, "kvconv", bundle)
        elif peer == "transformers":
            add(peer, python_of("genai", arguments.envs), "transformers", models.hf())
        elif peer in GENAI_KINDS:
            add(peer, python_of("genai", arguments.envs), "genai", models.genai(peer))
        elif peer == "openvino":
            add(peer, python_of("openvino", arguments.envs), "openvino", models.float16_gguf())
        elif peer == "optimum":
            add(peer, python_of("optimum", arguments.envs), "optimum", models.optimum())
        else:
            flash = "on" if peer == "llamacpp-fa" else "off"
            python = python_of("llamacpp", arguments.envs)
            extra = "off" if arguments.no_extra_buffers else "on"
            add(peer, python, "llamacpp", arguments.model.absolute(), flash, extra)
    return found


def measure(
    peers: list[Peer], depths: list[int], arguments: argparse.Namespace
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return all samples by peer and depth; every round runs all peers at every depth."""
    samples: dict[tuple[str, int], list[dict[str, Any]]] = {}
    prompts = {
        depth: np.random.default_rng(0).integers(
            100, arguments.vocab_size - 100, (arguments.batch, depth)
        )
        for depth in depths
    }
    for peer in peers:
        peer.run(prompts[depths[0]][:, :32], 4)  # warm up
    for round_index in range(arguments.repeats):
        for depth in depths:
            for peer in peers if round_index % 2 == 0 else reversed(peers):
                time.sleep(_SETTLE_S)
                sample = peer.run(prompts[depth], arguments.gen)
                samples.setdefault((peer.name, depth), []).append(sample)
                print(f"round {round_index + 1}: {peer.name} at {depth}", file=sys.stderr)
    return samples


def to_lines(
    peer: Peer, depth: int, samples: list[dict[str, Any]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a prefill and a decode line of one peer at one depth, or a line with its error."""
    head = {
        "peer": peer.name,
        "model": arguments.model.name,
        "context": depth,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "settings": peer.settings,
    }
    errors = [sample["error"] for sample in samples if "error" in sample]
    if errors:
        return [{**head, "what": "error", "error": errors[0]}]
    lines = []
    for what, count in (("prefill", depth), ("decode", arguments.gen)):
        best = min(samples, key=lambda sample: sample[f"{what}_s"])
        peak = "prefill_peak_rss_mb" if what == "prefill" else "peak_rss_mb"
        lines.append(
            {
                **head,
                "what": what,
                "tokens_per_s": round(arguments.batch * count / best[f"{what}_s"], 4),
                "seconds": round(best[f"{what}_s"], 5),
                "peak_rss_mb": max(sample[peak] for sample in samples),
                "runs": [round(sample[f"{what}_s"], 5) for sample in samples],
                "other_cores": best["other_cores"],
                "first_ids": best["ids"][:_FIRST_IDS],
            }
        )
    return lines


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--bundle", type=Path, action="append", default=[], help="of that model")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of: {', '.join(PEERS)}")
    parser.add_argument("--depths", default="128,512,2048,6000", help="prompt lengths")
    parser.add_argument("--gen", type=int, default=64, help="ids behind the first new one [64]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds [3]")
    parser.add_argument("--batch", type=int, default=1, help="rows [1]")
    parser.add_argument("--threads", type=int, default=2, help="threads [2]")
    parser.add_argument("--vocab-size", type=int, default=49152, help="of the model [49152]")
    parser.add_argument("--work", type=Path, default=Path("build/compare"), help="built models")
    parser.add_argument("--envs", type=Path, help="virtual environments [WORK/envs]")
    parser.add_argument(
        "--no-extra-buffers",
        action="store_true",
        help="llama.cpp without AMX and repacked weights, where those end with an error",
    )
    parser.add_argument("--prepare", action="store_true", help="only make what is missing")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers.split(",")
    unknown = set(arguments.peers) - PEERS.keys()
    if unknown:
        parser.error(f"unknown peers: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    arguments.envs = (arguments.envs or arguments.work / "envs").absolute()
    arguments.work = arguments.work.absolute()
    depths = [int(text) for text in arguments.depths.split(",")]
    found = commands(arguments)
    if arguments.prepare:
        return
    peers = [Peer(name, command) for name, command in found.items()]
    samples = measure(peers, depths, arguments)
    lines = [
        line
        for depth in depths
        for peer in peers
        for line in to_lines(peer, depth, samples[peer.name, depth], arguments)
    ]
    for peer in peers:
        peer.close()
    if arguments.out is not None:
        with arguments.out.open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
    print_table(lines)


if __name__ == "__main__":
    main()
