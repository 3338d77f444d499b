"""Verification: the shipped runtime against PyTorch, on the same token ids.

PyTorch goes first, while its model is in memory (`Verifier.reference`). The bundle is driven
afterwards (`Verifier.compare`), in a process of its own (`python -m kvconv.verify`): so both models
are never held at once, and the runtime is checked without PyTorch beside it. The checks:

1. whole prefill: the prompt in one run.
2. chunked prefill: the same prompt in runs of odd sizes.
3. decode: 16 tokens, one a run.
4. left-padded batch: prompts of unequal length in one batch, prefilled in chunks, then 4 tokens,
   against single runs.
5. rewind and re-prompt: back to the middle of the prompt, then another continuation.

The prompt crosses sliding windows twice where they are at most MAX_CROSSED_WINDOW tokens.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconv.converter.quiet import quiet
from kvconv.errors import KvconvError
from kvconv.manifest import CheckResult, Manifest, Verification, check_files, from_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvconv.runtime import KVCache, Session

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

TOLERANCES = {
    # Accumulation order alone moves logits of magnitude 30 by some 1e-4.
    "float32": 1e-3,
    # Logits of magnitude 30 are 0.016 apart in float16, and every layer rounds.
    "float16": 0.5,
}
"""Activations' dtype -> largest absolute logit difference allowed."""

DECODE_STEPS = 16
BATCH_DECODE_STEPS = 4
PROMPT_TOKENS = 128
MAX_CROSSED_WINDOW = 1024
MAX_LOGITS = 2**22
"""Logits kept per check, rows x vocab_size: 16 MB in float32."""
_CHUNKS = (1, 3, 17, 64, 31, 128, 257)
_PADDED_CHUNK = 96
_TEXT = (
    "The harbour was quiet before dawn. Two fishermen mended a net of 1,204 knots while the tide "
    "turned, and nobody spoke of the storm that had taken the old pier in 1987. “Is it far?” asked "
    "the girl. « Pas très loin », said the captain, и показал на север. 海の向こうに島が見えます。"
    "def distance(a, b): return abs(a - b) ** 0.5  # metres\nبعد ساعة عاد القارب. Dinner was rice, "
    "beans and a lemon; the bill came to €23.40. Later they counted the boats: one, two, three, "
    "five, eight, thirteen. Every answer led to a longer question, as it usually does at sea. 🙂 "
)


@dataclass(frozen=True)
class Continuation:
    """Token ids and PyTorch's logits for the last of them.

    Attributes:
        input_ids: The whole sequence, from its first token.
        logits: [kept, vocab_size] float32, for the last `kept` positions of `input_ids`.
    """

    input_ids: list[int]
    logits: FloatArray


@dataclass(frozen=True)
class Reference:
    """What PyTorch says about every sequence that the checks run.

    Attributes:
        prompt: The prompt, with the logits of as many last positions as MAX_LOGITS allows.
        decoded: The prompt and up to DECODE_STEPS greedy tokens, with the logits of the latter.
        rows: Rows of the padded batch: a prompt and up to BATCH_DECODE_STEPS greedy tokens each,
            with the logits of the last prompt position and of the tokens.
        reprompted: The first half of the prompt and another continuation, with its logits.
        not_checked: Sentences about what the prompt does not reach.
    """

    prompt: Continuation
    decoded: Continuation
    rows: tuple[Continuation, ...]
    reprompted: Continuation
    not_checked: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Write an .npz file that `load` reads."""
        arrays: dict[str, npt.NDArray[Any]] = {"not_checked": np.array(self.not_checked, np.str_)}
        for index, part in enumerate((self.prompt, self.decoded, self.reprompted, *self.rows)):
            arrays[f"{index}.input_ids"] = np.array(part.input_ids, np.int64)
            arrays[f"{index}.logits"] = part.logits
        np.savez(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            prompt, decoded, reprompted, *rows = [
                Continuation(arrays[f"{index}.input_ids"].tolist(), arrays[f"{index}.logits"])
                for index in range(len(arrays.files) // 2)
            ]
            not_checked = tuple(arrays["not_checked"].tolist())
        return cls(prompt, decoded, tuple(rows), reprompted, not_checked)


class StoredReference:
    """A reference on disk, for the process that checks; removed with this object."""

    def __init__(self, reference: Reference) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvconv-verify-")
        self.path = Path(self._folder.name) / "reference.npz"
        reference.save(self.path)


class Verifier:
    """Runs the checks; the converter calls it between tracing and the final rename."""

    def __init__(
        self,
        *,
        prompt_tokens: int | None = None,
        max_sequence_length: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Set the checks up.

        Args:
            prompt_tokens: Length of the prompt; None for 128, or past two sliding windows.
            max_sequence_length: Most tokens the bundle holds; None for what the model's config
                says. The prompt becomes shorter to fit.
            threads: Threads for ONNX Runtime; None for its default.
        """
        self._prompt_tokens = prompt_tokens
        self._max_sequence_length = max_sequence_length
        self._threads = threads

    def reference(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> StoredReference:
        """Run PyTorch on every sequence of the checks; takes some seconds.

        Args:
            model: In evaluation mode, on the CPU.
            tokenizer: Encodes the test text; None for pseudo-random ids.
        """
        config = model.config.get_text_config()
        length, steps, not_checked = self._lengths(config)
        prompt = _prompt_ids(tokenizer, config.vocab_size, length)
        kept = max(1, min(length, MAX_LOGITS // config.vocab_size))
        batch_steps = min(BATCH_DECODE_STEPS, steps)
        tail = length // 4 + 1

        decoded = _greedy(model, prompt, steps)
        rows = [_greedy(model, prompt[-n:], batch_steps) for n in (length // 3 + 1, min(5, length))]
        reference = Reference(
            prompt=_forward(model, prompt, kept),
            decoded=Continuation(decoded.input_ids, decoded.logits[1:]),
            rows=(_without_last(decoded, steps - batch_steps), *rows),
            reprompted=_forward(
                model, prompt[: length // 2] + prompt[:tail][::-1], min(kept, tail)
            ),
            not_checked=not_checked,
        )
        return StoredReference(reference)

    def _lengths(self, config: Any) -> tuple[int, int, tuple[str, ...]]:
        """Return the prompt's length, the decode steps, and what the prompt does not reach."""
        limit = self._max_sequence_length or getattr(config, "max_position_embeddings", None)
        window = _largest_window(config)
        crossing = 2 * window + 90 if window is not None else 0
        length = self._prompt_tokens or PROMPT_TOKENS
        if self._prompt_tokens is None and window is not None and window <= MAX_CROSSED_WINDOW:
            length = max(length, crossing)
        steps = DECODE_STEPS
        if limit is not None:
            steps = min(steps, max(1, limit // 4))
            length = max(1, min(length, limit - steps))
        if window is None or length > window:
            return length, steps, ()
        sentence = (
            f"the prompt of {length} tokens does not cross the sliding window of {window}; "
            f"kvconv verify --prompt-tokens {crossing} does, where the bundle holds so many"
        )
        return length, steps, (sentence,)

    def compare(self, folder: Path, reference: Any) -> Verification:
        """Drive a bundle through the checks; nothing is written.

        Args:
            folder: A complete bundle.
            reference: The `StoredReference` that `reference` returned for the same model.

        Returns:
            The result, `passed` or `failed`; see `Verification.require_passed`.
        """
        command = [sys.executable, "-m", "kvconv.verify", str(folder), str(reference.path)]
        command += [] if self._threads is None else [str(self._threads)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            raise KvconvError(f"The bundle could not be run for verification: {lines[-1]}")
        result: Verification = from_json(Verification, json.loads(child.stdout), "verification")
        return result


def run_checks(session: Session, manifest: Manifest, reference: Reference) -> Verification:
    """Run all checks of this module's list against a reference."""
    tolerance = TOLERANCES[manifest.dtype]
    prompt, decoded = reference.prompt.input_ids, reference.decoded.input_ids
    cache = session.new_cache(1, len(decoded))
    checks = []

    def check(name: str, found: FloatArray, wanted: FloatArray) -> None:
        checks.append(compare_logits(name, found, wanted, tolerance))

    # 1. whole prefill, and 3. decode behind it
    kept = len(reference.prompt.logits)
    whole = session.run(cache, _row(prompt), num_logits_to_keep=kept)[0]
    check("whole prefill", whole, reference.prompt.logits)
    steps = [session.run(cache, _row([token]))[0] for token in decoded[len(prompt) :]]
    check(f"decode, {len(steps)} steps", np.concatenate(steps), reference.decoded.logits)

    # 5. rewind and re-prompt, on the same cache
    half = len(prompt) // 2
    cache.rewind(half)
    again = session.run(
        cache,
        _row(reference.reprompted.input_ids[half:]),
        num_logits_to_keep=len(reference.reprompted.logits),
    )[0]
    check("rewind and re-prompt", again, reference.reprompted.logits)

    # 2. chunked prefill
    cache.reset()
    check("chunked prefill", _chunked(session, cache, prompt, kept), reference.prompt.logits)

    # 4. left-padded batch
    found, wanted = _padded_batch(session, reference.rows, pad_id=manifest.pad_token_id or 0)
    check("left-padded batch", found, wanted)

    return Verification(
        status="passed" if all(result.passed for result in checks) else "failed",
        tolerance=tolerance,
        checks=tuple(checks),
        not_checked=reference.not_checked,
    )


def record(folder: Path, manifest: Manifest, verification: Verification) -> None:
    """Write a verification result into a bundle's manifest."""
    dataclasses.replace(manifest, verification=verification).write(folder)


def compare_logits(
    name: str, found: FloatArray, wanted: FloatArray, tolerance: float
) -> CheckResult:
    """Compare two sets of logits, both [positions, vocab_size] float32.

    A different argmax fails a check unless PyTorch's own two logits are within the tolerance of
    each other. Non-finite differences count as the largest float.
    """
    difference = np.abs(found - wanted)
    largest = float(np.finfo(np.float32).max)
    np.nan_to_num(difference, copy=False, nan=largest, posinf=largest)
    rows = np.arange(len(wanted))
    best_found, best_wanted = found.argmax(axis=-1), wanted.argmax(axis=-1)
    margin = wanted[rows, best_wanted] - wanted[rows, best_found]
    max_abs = float(difference.max())
    return CheckResult(
        name=name,
        positions=len(wanted),
        max_abs=max_abs,
        mean_abs=float(difference.mean(dtype=np.float64)),
        kl=_mean_kl(wanted, found),
        top1=float((best_found == best_wanted).mean()),
        passed=max_abs <= tolerance and bool((margin <= tolerance).all()),
    )


def _mean_kl(wanted: FloatArray, found: FloatArray) -> float:
    total = 0.0
    with np.errstate(invalid="ignore"):  # infinite logits; the result is checked below
        for row_wanted, row_found in zip(wanted, found, strict=True):
            p, q = (_log_softmax(row.astype(np.float64)) for row in (row_wanted, row_found))
            total += float(np.exp(p) @ (p - q))
    mean = total / len(wanted)
    # Rounding may leave a sum of tiny terms just below zero.
    return max(mean, 0.0) if np.isfinite(mean) else float(np.finfo(np.float32).max)


def _log_softmax(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _chunked(session: Session, cache: KVCache, prompt: list[int], kept: int) -> FloatArray:
    """Prefill in runs of odd sizes; return the logits of the last `kept` positions."""
    pieces, position, turn = [], 0, 0
    while position < len(prompt):
        chunk = prompt[position : position + _CHUNKS[turn % len(_CHUNKS)]]
        position, turn = position + len(chunk), turn + 1
        wanted = min(len(chunk), position - (len(prompt) - kept))
        logits = session.run(cache, _row(chunk), num_logits_to_keep=max(1, wanted))[0]
        if wanted > 0:
            pieces.append(logits)
    return np.concatenate(pieces)


def _padded_batch(
    session: Session, rows: Sequence[Continuation], pad_id: int
) -> tuple[FloatArray, FloatArray]:
    """Run rows as one left-padded batch; return found and wanted logits, rows stacked."""
    steps = len(rows[0].logits) - 1
    prompts = [row.input_ids[:-steps] for row in rows]
    width = max(map(len, prompts))
    cache = session.new_cache(len(rows), width + steps)
    mask = np.ones((len(rows), width + steps), np.int64)
    input_ids = np.full((len(rows), width), pad_id, np.int64)
    for index, prompt in enumerate(prompts):
        mask[index, : width - len(prompt)] = 0
        input_ids[index, width - len(prompt) :] = prompt
    for start in range(0, width, _PADDED_CHUNK):
        chunk = input_ids[:, start : start + _PADDED_CHUNK]
        last = session.run(cache, chunk, attention_mask=mask[:, : start + chunk.shape[1]])
    runs = [last]
    for step in range(steps):
        tokens = np.array([[row.input_ids[step - steps]] for row in rows], np.int64)
        runs.append(session.run(cache, tokens, attention_mask=mask[:, : width + step + 1]))
    return np.concatenate(np.concatenate(runs, axis=1)), np.concatenate([r.logits for r in rows])


def _row(input_ids: list[int]) -> IntArray:
    return np.array([input_ids], np.int64)


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, length: int
) -> list[int]:
    if tokenizer is None:
        random = np.random.default_rng(7)
        return [int(token) for token in random.integers(0, vocab_size, length)]
    ids: list[int] = []
    text = _TEXT
    while len(ids) < length:
        ids = [token for token in tokenizer(text)["input_ids"] if token < vocab_size]
        text += f"Chapter {len(text)}. {_TEXT}"
    return ids[:length]


def _largest_window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return int(window) if window and used else None


def _forward(model: PreTrainedModel, input_ids: list[int], keep: int) -> Continuation:
    """Run PyTorch once, without a cache."""
    import torch

    with quiet(), torch.inference_mode():
        output = model(input_ids=torch.tensor([input_ids]), use_cache=False, logits_to_keep=keep)
    return Continuation(input_ids, output.logits[0, -keep:].float().numpy())


def _greedy(model: PreTrainedModel, input_ids: list[int], steps: int) -> Continuation:
    """Append PyTorch's tokens; logits of the last prompt position and of each appended token."""
    import torch

    prompt = torch.tensor([input_ids])
    with quiet(), torch.inference_mode():
        # One token more than is fed, for the logits of the last one; EOS must not end it.
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(output.logits).float().numpy()
    return Continuation(output.sequences[0, :-1].tolist(), logits)


def _without_last(sequence: Continuation, tokens: int) -> Continuation:
    """Return what `_greedy` gives for so many tokens less."""
    end = len(sequence.input_ids) - tokens
    return Continuation(sequence.input_ids[:end], sequence.logits[: len(sequence.logits) - tokens])


def _main(folder: Path, reference: Path, threads: int | None) -> None:
    """Run the checks and print the result as JSON: the process behind `Verifier.compare`."""
    from kvconv.runtime import Bundle, Session

    bundle = Bundle.open(folder)
    check_files(folder, bundle.manifest, hash_all=True)
    session = Session(bundle, threads=threads)
    result = run_checks(session, bundle.manifest, Reference.load(reference))
    sys.stdout.write(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    try:
        _main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
    except KvconvError as error:
        sys.exit(str(error))
