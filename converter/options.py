"""What a caller of the converter gives and gets; imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from kvconv.errors import ExportError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import (
    AccuracyLevel,
    ActivationDtype,
    AttentionFlavour,
    CacheDtype,
    Kernels,
    Provider,
    Quantization,
    QuantizedDtype,
    Verification,
)

DEFAULT_OPSET = 23
BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export.

    Attributes:
        provider: What the bundle is for. One for CUDA runs on the CPU too, though slower than one
            for the CPU alone.
        dtype: Type of activations, and of weights unless `weights` says otherwise; checkpoints of
            other types are converted.
        weights: Type of linear weights; None is `dtype`.
        block_size: Quantised weights of a row that share a scale: 16, 32, 64, 128 or 256. None is
            32; 16 for int4 weights that lose too much, and for int8 at accuracy level 4.
        pure: Whether every weight of an int4 bundle has 4 bits; otherwise sensitive ones that lose
            too much have 8.
        symmetric: Whether quantised weights do without zero points; None is what measures best,
            int8 without and int4 with them. int8 never has them.
        accuracy_level: For products with quantised weights: what activations become; see
            `kvconv.manifest.Quantization`. None is the flavour's default.
        attention: Flavour of the attention nodes.
        kv_cache_dtype: How keys and values are stored; None is `dtype`.
        ring: Whether windowed layers of the flash flavour keep the tokens of their window only.
        max_sequence_length: Most tokens (prompt and new) a cache may hold; None is what the model
            was made for, or the part of it that a cache can follow (longrope).
        opset: Version of the default ONNX domain, 18 to 23.
        revision: Branch, tag or commit of a hub model.
        cache_dir: Where hub files are kept; None is Hugging Face's own cache.
        trust_remote_code: Whether Python code that comes with the model may run.
        overwrite: Whether a bundle at the output may be replaced.
        without: Optional rules to leave out: `OPTIONAL_RULES` of `kvconv.converter.rewrite`, `pack`
            and `sort_columns`. For measurements; no option of the command line.
    """

    provider: Provider = "cpu"
    dtype: ActivationDtype = "float32"
    weights: QuantizedDtype | None = None
    block_size: int | None = None
    pure: bool = False
    symmetric: bool | None = None
    accuracy_level: AccuracyLevel | None = None
    attention: AttentionFlavour = "flash"
    kv_cache_dtype: CacheDtype | None = None
    ring: bool = True
    max_sequence_length: int | None = None
    opset: int = DEFAULT_OPSET
    revision: str | None = None
    cache_dir: Path | None = None
    trust_remote_code: bool = False
    overwrite: bool = False
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse what nothing can be made of.

        Raises:
            ValueError: There is no such block size or accuracy level.
            ExportError: The flavour has no kernels of kvconv's on CUDA.
        """
        if self.provider == "cuda" and self.attention != "flash":
            raise ExportError(
                f"--attention {self.attention} was asked for with --provider cuda, which brings "
                f"CUDA kernels for the flash flavour. Leave out one of the two."
            )
        if self.block_size not in (None, *BLOCK_SIZES):
            raise ValueError(
                f"block_size is {self.block_size}; it is one of {_listed(BLOCK_SIZES)}"
            )
        levels = get_args(AccuracyLevel)
        if self.accuracy_level not in (None, *levels):
            raise ValueError(
                f"accuracy_level is {self.accuracy_level}; it is one of {_listed(levels)}"
            )

    @property
    def has_own_weights(self) -> bool:
        """Whether quantised weights are for kvconv's operators, and not for ONNX Runtime's."""
        return self.attention == "flash" and self.provider == "cpu"

    @property
    def accuracy_levels(self) -> tuple[AccuracyLevel, ...]:
        """The accuracy levels that there are, the default first."""
        # On CUDA, ONNX Runtime's operator multiplies in the activations' type.
        return (1,) if self.provider == "cuda" else FLAVOURS[self.attention].accuracy_levels

    @property
    def chosen_accuracy_level(self) -> AccuracyLevel:
        """The accuracy level asked for, or the default."""
        return self.accuracy_level or self.accuracy_levels[0]

    @property
    def chosen_block_size(self) -> int:
        """The block size asked for, or the default.

        Level 4 rounds activations in blocks no larger than the weights', which is most of what
        int8 loses there.
        """
        rounds_both = self.weights == "int8" and self.chosen_accuracy_level == 4
        return self.block_size or (16 if rounds_both else 32)

    def cache_dtype(self) -> CacheDtype:
        """Return how keys and values are stored.

        Raises:
            ExportError: The flavour stores them as the activations are, and no other way.
        """
        chosen = self.kv_cache_dtype or self.dtype
        if chosen != self.dtype and not FLAVOURS[self.attention].own_cache_dtype:
            raise ExportError(
                f"--kv-cache-dtype {chosen} was asked for, but the operators of the "
                f"{self.attention} flavour take keys and values of the activations' type, "
                f"{self.dtype}. Leave it out, or take --attention flash."
            )
        return chosen

    def quantization(self) -> Quantization | None:
        """Return how linear weights are quantised; None if they are not.

        Raises:
            ExportError: An option says how to quantise what is not quantised so.
        """
        given = {
            f"--block-size {self.block_size}": self.block_size is not None,
            "--pure": self.pure,
            "--symmetric": self.symmetric is True,
            "--asymmetric": self.symmetric is False,
            f"--accuracy-level {self.accuracy_level}": self.accuracy_level is not None,
        }
        if self.weights is None:
            if wanted := [option for option, is_given in given.items() if is_given]:
                raise ExportError(
                    f"{', '.join(wanted)} was asked for, but the weights stay {self.dtype}: that "
                    f"is for quantised ones. Add --weights int4 or int8, or leave it out."
                )
            return None
        if self.weights == "int8" and self.pure:
            raise ExportError(
                "--pure was asked for, but it gives int4 weights 4 bits, and int8 ones all have 8. "
                "Leave it out, or take --weights int4."
            )
        if self.weights == "int8" and self.symmetric is False:
            raise ExportError(
                "--asymmetric was asked for, but int8 weights are symmetric: zero points would "
                "bring them nothing. Leave it out, or take --weights int4."
            )
        levels = self.accuracy_levels
        if self.chosen_accuracy_level not in levels:
            where = "CUDA" if self.provider == "cuda" else f"the {self.attention} flavour"
            remedy = "leave it out" if self.provider == "cuda" else "--attention flash"
            raise ExportError(
                f"--accuracy-level {self.accuracy_level} was asked for, but the operator of "
                f"{where} computes it as level 1. Take one of {_listed(sorted(levels))}, or "
                f"{remedy}."
            )
        return Quantization(
            block_size=self.chosen_block_size,
            symmetric=self.weights == "int8" or bool(self.symmetric),
            accuracy_level=self.chosen_accuracy_level,
            method="least squares",
        )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What quantising did.

    Attributes:
        float_bytes: Float bytes of the weights that were quantised.
        stored_bytes: Bits and block size -> what such weights take now, scales and zero points
            included.
        left_bytes: Why linear weights stayed float -> their bytes.
    """

    float_bytes: int
    stored_bytes: dict[str, int]
    left_bytes: dict[str, int]


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
        weights: What quantising did; None where no weight was to be quantised.
        provider: What the bundle is for.
    """

    path: Path
    rewrites: dict[str, int]
    refusals: tuple[str, ...]
    seconds: dict[str, float]
    verification: Verification
    peak_memory_mb: float | None
    size_bytes: int
    weights: WeightsReport | None = None
    provider: Provider = "cpu"


class Verifier(Protocol):
    """Compares a bundle with the PyTorch model that it was made from."""

    def reference(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_sequence_length: int,
        float_weights: object | None = None,
    ) -> object:
        """Compute what `compare` needs, while the PyTorch model is in memory.

        Args:
            model: The `transformers.PreTrainedModel`, in eval mode.
            tokenizer: Its tokenizer, or None.
            max_sequence_length: Most tokens the bundle holds.
            float_weights: What this gave for the model before its weights were rounded.
        """
        ...

    def compare(self, folder: Path, reference: object) -> Verification:
        """Run the bundle in a folder and compare; PyTorch's weights are gone by now."""
        ...


class KernelBuilder(Protocol):
    """Compiles the CUDA kernels of a bundle; no GPU is needed."""

    def build(self, model_path: Path) -> tuple[bytes, Kernels]:
        """Return the content of `kvconv.names.KERNELS_FILE`, and what the manifest says of it.

        The same model gives the same bytes.

        Args:
            model_path: The rewritten model; its weights are not read.

        Raises:
            ExportError: An attention has a shape that kvconv has no CUDA kernels for.
        """
        ...


class Progress(Protocol):
    """Hears the name of each stage as it begins."""

    def __call__(self, stage: str) -> None:
        """Take note that a stage begins."""
        ...
