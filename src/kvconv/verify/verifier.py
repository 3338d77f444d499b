"""Runs verification from outside: PyTorch here, the bundle in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconv.errors import KvconvError
from kvconv.manifest import Manifest, Provider, Verification, from_json
from kvconv.verify.reference import Reference, StoredReference

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Verifier:
    """Runs the checks; the converter calls it between tracing and the final rename."""

    def __init__(
        self,
        *,
        prompt_tokens: int | None = None,
        threads: int | None = None,
        provider: Provider = "cpu",
    ) -> None:
        """Set the checks up.

        Args:
            prompt_tokens: Length of the prompt; None for 128, or past two sliding windows.
            threads: Threads for ONNX Runtime; None for its default.
            provider: Where the bundle runs; PyTorch's model runs on the CPU.
        """
        self._provider = provider
        self._prompt_tokens = prompt_tokens
        self._threads = threads

    def reference(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_sequence_length: int,
        float_weights: Any = None,
    ) -> StoredReference:
        """Run PyTorch on every sequence of the checks; takes some seconds.

        Args:
            model: In evaluation mode, on the CPU.
            tokenizer: Encodes the test text; None for pseudo-random ids.
            max_sequence_length: Most tokens the bundle holds, at least 2. The prompt becomes
                shorter to fit.
            float_weights: What this returned for the model before its weights were rounded.
        """
        # Here, because the process that checks must not import PyTorch.
        from kvconv.verify.pytorch import make_reference

        reference = make_reference(
            model,
            tokenizer,
            prompt_tokens=self._prompt_tokens,
            max_sequence_length=max_sequence_length,
        )
        if float_weights is not None:
            before = Reference.load(float_weights.rewound())
            reference = dataclasses.replace(reference, float_logits=before.prompt.logits)
        return StoredReference(reference)

    def compare(self, folder: Path, reference: Any) -> Verification:
        """Drive a bundle through the checks; nothing is written.

        Args:
            folder: A complete bundle.
            reference: The `StoredReference` that `reference` returned for the same model.

        Returns:
            The result, `passed` or `failed`; see `Verification.require_passed`.
        """
        # -P: without it, -m imports from the current folder first, whatever lies there.
        command = [sys.executable, "-P", "-m", "kvconv.verify", str(folder), self._provider]
        command += [] if self._threads is None else [str(self._threads)]
        child = subprocess.run(
            command, stdin=reference.rewound(), capture_output=True, text=True, check=False
        )
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
            raise KvconvError(f"The bundle could not be run for verification: {lines[-1]}")
        result: Verification = from_json(Verification, json.loads(child.stdout), "verification")
        return result


def require_same_model(manifest: Manifest, model: PreTrainedModel) -> None:
    """Refuse a PyTorch model that cannot be the one a bundle was made of.

    Raises:
        KvconvError: Its architecture, vocabulary, widths or cache differ from the manifest's.
    """
    from kvconv.converter.decoder_spec import describe
    from kvconv.converter.model_sizes import run_sizes

    spec = describe(model)
    layers, shapes = manifest.cache_layers, spec.cache_shapes
    facts: list[tuple[str, object, object]] = [
        ("architecture", manifest.architecture, spec.architecture),
        ("vocabulary size", manifest.vocab_size, spec.vocab_size),
        ("number of cache layers", len(layers), len(shapes)),
    ]
    facts += [
        (
            f"cache shape of layer {index} (heads, width of a key, of a value)",
            (layer.num_key_value_heads, layer.key_head_dim, layer.value_head_dim),
            (shape.num_key_value_heads, shape.key_head_dim, shape.value_head_dim),
        )
        for index, (layer, shape) in enumerate(zip(layers, shapes, strict=False))
    ]
    if manifest.run_sizes is not None:
        sizes = run_sizes(model, dtype=manifest.dtype, weights=None)
        facts += [
            ("number of heads", manifest.run_sizes.num_attention_heads, sizes.num_attention_heads),
            ("widest layer", manifest.run_sizes.activation_width, sizes.activation_width),
        ]
    for name, wanted, found in facts:
        if found != wanted:
            raise KvconvError(
                f"The PyTorch model is not the one that the bundle was exported from: its {name} "
                f"is {found}, the bundle's is {wanted}. Give {manifest.source.model} with --model."
            )


def record(folder: Path, manifest: Manifest, verification: Verification) -> None:
    """Write a verification result into a bundle's manifest."""
    dataclasses.replace(manifest, verification=verification).write(folder)
