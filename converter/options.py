"""What a caller of the converter gives and gets; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvconv.manifest import ActivationDtype, AttentionFlavour, Verification

DEFAULT_OPSET = 23


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export.

    Attributes:
        dtype: Type of weights and activations; checkpoints of other types are converted.
        attention: Flavour of the attention nodes.
        max_sequence_length: Most tokens (prompt and new) a cache may hold; None is what the model
            was made for, or the part of it that a cache can follow (longrope).
        opset: Version of the default ONNX domain, 18 to 23.
        revision: Branch, tag or commit of a hub model.
        cache_dir: Where hub files are kept; None is Hugging Face's own cache.
        trust_remote_code: Whether Python code that comes with the model may run.
        overwrite: Whether a bundle at the output may be replaced.
    """

    dtype: ActivationDtype = "float32"
    attention: AttentionFlavour = "flash"
    max_sequence_length: int | None = None
    opset: int = DEFAULT_OPSET
    revision: str | None = None
    cache_dir: Path | None = None
    trust_remote_code: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did.

    Attributes:
        path: The bundle.
        rewrites: Rule name -> times fired.
        refusals: Sentences saying what was left alone, and why.
        seconds: Stage name -> seconds, in order.
        verification: Result of the comparison with PyTorch.
        peak_memory_mb: Largest resident memory so far of this process, or of the one that verifies,
            in 10^6 bytes; None where unknown.
        size_bytes: All files of the bundle.
    """

    path: Path
    rewrites: dict[str, int]
    refusals: tuple[str, ...]
    seconds: dict[str, float]
    verification: Verification
    peak_memory_mb: float | None
    size_bytes: int


class Verifier(Protocol):
    """Compares a bundle with the PyTorch model that it was made from."""

    def reference(self, model: Any, tokenizer: Any, *, max_sequence_length: int) -> object:
        """Compute what `compare` needs, while the PyTorch model is in memory.

        Args:
            model: The `transformers.PreTrainedModel`, in eval mode.
            tokenizer: Its tokenizer, or None.
            max_sequence_length: Most tokens the bundle holds.
        """
        ...

    def compare(self, folder: Path, reference: object) -> Verification:
        """Run the bundle in a folder and compare; PyTorch's weights are gone by now."""
        ...


class Progress(Protocol):
    """Hears the name of each stage as it begins."""

    def __call__(self, stage: str) -> None:
        """Take note that a stage begins."""
        ...
