"""The bundle's manifest, `kvconv.json`: the contract between the converter and every runtime.

The converter writes it last, runtimes read it first, and nobody guesses facts from tensor shapes.
It lists each file with size and sha256, and carries a checksum of its own bytes.
"""

import collections.abc
import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvconv import __version__
from kvconv.errors import BundleError, VerificationError
from kvconv.names import MANIFEST_FILE

FORMAT_VERSION = 6
HASHED_ON_OPEN_BYTES = 64 * 1024 * 1024
"""Opening a bundle hashes files below this size; larger ones are hashed by `inspect --check`."""

AttentionFlavour = Literal["flash", "standard", "gqa"]
ActivationDtype = Literal["float32", "float16"]
QuantizedDtype = Literal["int8", "int4"]
AccuracyLevel = Literal[1, 2, 4]
WeightsDtype = Literal["float32", "float16", "int8", "int4"]
CacheDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
CacheMode = Literal["auto", "ring"]
Provider = Literal["cpu", "cuda"]
_LATER_FIELDS = frozenset({"quantization", "exceeded", "run_sizes", "kernels"})
"""Fields that older formats do not have; their defaults say what is true of those bundles."""
FLOAT_WEIGHTS = "float weights"
"""The check of a bundle with quantised weights against PyTorch with those they were made of."""
FLOAT_CACHE = "float cache"
"""The check of a bundle with a quantised cache against PyTorch, whose cache is not."""
_CHECKSUM_KEY = "manifest_sha256"
_NO_CHECKSUM = "0" * 64


@dataclass(frozen=True, slots=True)
class Source:
    """Where the model came from.

    Attributes:
        model: Hub id, or the name of the local folder or GGUF file.
        kind: How it was read.
        revision: Resolved commit of a hub model; None for local ones.
        license: SPDX-like name if the source states one.
    """

    model: str
    kind: Literal["hub", "folder", "gguf"]
    revision: str | None = None
    license: str | None = None


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV cache of one layer: [batch_size, num_key_value_heads, capacity, head_dim] (BNSH).

    Attributes:
        num_key_value_heads: Heads stored.
        key_head_dim: Numbers of a key head; `kvconv.cache_layout` says how wide they are stored.
        value_head_dim: Numbers of a value head.
        dtype: How they are stored.
        window_size: Tokens a query sees, itself included; None for all.
        cache_mode: `auto` (shared buffer or concat), or `ring` with `capacity` slots.
        capacity: Slots of a ring, more than window_size; None where the caller chooses.
    """

    num_key_value_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: CacheDtype
    window_size: int | None = None
    cache_mode: CacheMode = "auto"
    capacity: int | None = None

    def slots(self, max_sequence_length: int) -> int:
        """Return the tokens per row that the layer holds in a cache of that capacity."""
        return min(self.capacity or max_sequence_length, max_sequence_length)

    @property
    def slack(self) -> int | None:
        """Slots of a ring beyond its window: one new token less than a run may have; or None."""
        if self.capacity is None or self.window_size is None:
            return None
        return self.capacity - self.window_size


RING_SLACK = 256
"""Slots that an export gives a ring beyond its window: what a chunk of a prompt may take."""


def ring_capacity(window_size: int | None, max_sequence_length: int | None) -> int | None:
    """Return the slots of the ring that a layer becomes; None where a ring would save nothing.

    Args:
        window_size: Tokens that a query of the layer sees; None for all.
        max_sequence_length: Most tokens that a cache will hold; None for any number.
    """
    if window_size is None:
        return None
    capacity = window_size + RING_SLACK
    return capacity if max_sequence_length is None or capacity < max_sequence_length else None


@dataclass(frozen=True, slots=True)
class RunSizes:
    """What a run takes of memory beside weights and cache; see `kvconv.plan`.

    Attributes:
        num_attention_heads: Query heads of a layer.
        activation_width: Numbers per token that go into the widest linear layer and come out of it,
            those of all experts that a token is routed to; without the LM head.
        packed_bytes: What ONNX Runtime keeps beside float weights once the model is loaded. It
            packs them for its products, in float32, and reads a tied embedding as it is as well.
    """

    num_attention_heads: int
    activation_width: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear weights are quantised.

    Attributes:
        block_size: Weights of a row that share a scale, where nothing more precise was chosen.
        symmetric: Whether all zero points are the middle, 2^(bits-1); 8-bit weights always are.
        accuracy_level: What activations become in products with the weights. 4: 8-bit integers,
            each block with a scale; 2: 16-bit ones; 1: they stay float.
        method: How scales and zero points were chosen.
        stored_bytes: What the weights take, by bits and block size.
    """

    block_size: int
    symmetric: bool
    accuracy_level: AccuracyLevel
    method: str
    stored_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The CUDA kernels of a bundle, in `kvconv.names.KERNELS_FILE`.

    Attributes:
        gpus: What they were compiled for, as `kvconv build --gpu` names it; newer GPUs of the same
            generation run them too, and others may run PTX.
        num_kernels: How many there are.
    """

    gpus: tuple[str, ...]
    num_kernels: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one bundle file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One verification check against PyTorch, over all logits it compared.

    Attributes:
        name: For example `whole prefill`.
        positions: Logit rows compared.
        max_abs: Largest absolute difference.
        mean_abs: Mean absolute difference.
        kl: Mean KL divergence per position, in nats, PyTorch's distribution first.
        top1: Fraction of positions with the same argmax, in [0, 1].
        passed: Whether max_abs, kl and the tokens that differ are within what the tolerance allows.
        exceeded: What is not, each with the value found and the tolerance.
    """

    name: str
    positions: int
    max_abs: float
    mean_abs: float
    kl: float
    top1: float
    passed: bool
    exceeded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What `kvconv verify` found, or that it was skipped.

    Attributes:
        status: `passed`, `failed` or `skipped`.
        tolerance: Largest absolute logit difference allowed: a part of the spread of PyTorch's
            logits that depends on the dtype.
        checks: In the order run.
        not_checked: Sentences naming what no check reached, and why.
    """

    status: Literal["passed", "failed", "skipped"]
    tolerance: float | None = None
    checks: tuple[CheckResult, ...] = ()
    not_checked: tuple[str, ...] = ()

    def require_passed(self) -> None:
        """Raise for the first check that failed.

        Raises:
            VerificationError: Its logits differ from PyTorch's by more than the tolerance.
        """
        is_quantized = any(check.name == FLOAT_WEIGHTS for check in self.checks)
        for check in self.checks:
            if not check.passed:
                tolerance = self.tolerance or 0.0
                remedy = "Please report this model"
                if check.name == FLOAT_CACHE:
                    remedy = (
                        "Keys and values that lose too much in so few bits need "
                        "--kv-cache-dtype int8, or float16; so does a mixture of experts in which "
                        "they send tokens to others"
                    )
                elif check.name == FLOAT_WEIGHTS:
                    remedy = (
                        "Weights that lose too much in so few bits need --weights int8, "
                        "--block-size 16, or no --pure and --symmetric; with all of these, please "
                        "report this model"
                    )
                elif is_quantized:
                    remedy = (
                        "A mixture of experts may need --accuracy-level 1; otherwise please report "
                        "this model"
                    )
                raise VerificationError(
                    f"The bundle differs from PyTorch: in the check {check.name!r} "
                    f"{' and '.join(check.exceeded)}; {check.top1:.1%} of the most likely tokens "
                    f"agree. {remedy}; kvconv export --no-verify writes it all the same.",
                    check=check.name,
                    max_abs=check.max_abs,
                    tolerance=tolerance,
                    exceeded=check.exceeded,
                )


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a runtime must know before it opens the graph.

    Attributes:
        source: Where the model came from.
        architecture: Hugging Face class name, for example `LlamaForCausalLM`.
        model_type: Hugging Face model type, for example `llama`.
        attention: Flavour of the attention nodes.
        dtype: Type of the activations.
        weights_dtype: Type of the stored linear weights.
        opset: Version of the default ONNX domain.
        op_version: Version of the kvconv operator domain; None when the graph uses none.
        vocab_size: Width of the logits.
        max_sequence_length: Most tokens (prompt and new) the model may hold.
        eos_token_ids: Ids that end a generation, ascending; may be empty.
        bos_token_id: Id that starts a text, if the model has one.
        pad_token_id: Id for padded slots, if the model has one.
        cache_layers: One entry per layer of the cache, by layer index.
        inputs: Graph input names in order, overridable initializers included.
        outputs: Graph output names in order.
        rewrites: Rule name -> times fired.
        files: Every file of the bundle except the manifest.
        refusals: Sentences saying what was left alone, and why.
        verification: Result of the last verification.
        quantization: How int8 and int4 weights were made; None for float ones.
        run_sizes: What a run takes of memory; None where formats before 4 do not say.
        kernels: The CUDA kernels; None in bundles for the CPU.
        kvconv_version: Version that wrote the bundle.
        format_version: Version of this format.
    """

    source: Source
    architecture: str
    model_type: str
    attention: AttentionFlavour
    dtype: ActivationDtype
    weights_dtype: WeightsDtype
    opset: int
    op_version: int | None
    vocab_size: int
    max_sequence_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    cache_layers: tuple[CacheLayer, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rewrites: Mapping[str, int]
    files: Mapping[str, FileEntry]
    refusals: tuple[str, ...] = ()
    verification: Verification = field(default_factory=lambda: Verification("skipped"))
    quantization: Quantization | None = None
    run_sizes: RunSizes | None = None
    kernels: Kernels | None = None
    kvconv_version: str = __version__
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write `kvconv.json` into a bundle folder, replacing an older one in one step."""
        document = {**dataclasses.asdict(self), _CHECKSUM_KEY: _NO_CHECKSUM}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        checksum = hashlib.sha256(text.encode()).hexdigest()
        partial = folder / f".{MANIFEST_FILE}.partial"
        try:
            partial.write_text(text.replace(_NO_CHECKSUM, checksum), encoding="utf-8")
            partial.replace(folder / MANIFEST_FILE)
        finally:
            partial.unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `kvconv.json`; the other files are not touched.

    Args:
        folder: The bundle.

    Raises:
        BundleError: The folder or manifest is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise BundleError(
            f"There is no bundle at {folder}. Make one with: kvconv export MODEL -o {folder}",
            file=str(folder),
        )
    if not path.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST_FILE}. "
            f"Make one with: kvconv export MODEL -o BUNDLE",
            file=MANIFEST_FILE,
        )
    raw = path.read_bytes()
    try:
        document = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _damaged(f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged("it is not a JSON object")
    version = document.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BundleError(
            f"{MANIFEST_FILE} has format version {version}; this kvconv reads up to "
            f"{FORMAT_VERSION}. Upgrade kvconv, or export the model again.",
            file=MANIFEST_FILE,
        )
    checksum = document.pop(_CHECKSUM_KEY, None)
    if not isinstance(checksum, str) or len(checksum) != len(_NO_CHECKSUM):
        raise _damaged(f"its {_CHECKSUM_KEY} is missing")
    unsigned = raw.replace(checksum.encode(), _NO_CHECKSUM.encode())
    if hashlib.sha256(unsigned).hexdigest() != checksum:
        raise _damaged("its checksum does not match its content")
    try:
        manifest = from_json(Manifest, document, "manifest")
    except (TypeError, ValueError) as error:
        raise _damaged(str(error)) from error
    if (manifest.quantization is None) != (manifest.weights_dtype in get_args(ActivationDtype)):
        how = "lacks" if manifest.quantization is None else "has"
        raise _damaged(f"its weights_dtype is {manifest.weights_dtype}, and it {how} quantization")
    for index, layer in enumerate(manifest.cache_layers):
        if (layer.cache_mode == "ring") != (layer.capacity is not None) or (layer.slack or 0) < 0:
            raise _damaged(
                f"layer {index} has a cache of mode {layer.cache_mode}, capacity {layer.capacity} "
                f"and window_size {layer.window_size}"
            )
    for name in manifest.files:
        # A bundle is flat; anything else could reach outside the folder.
        if name in ("", ".", "..") or any(character in name for character in "/\\:"):
            raise _damaged(f"it lists {name!r}, which is not a plain file name")
    return typing.cast(Manifest, manifest)


def file_entry(path: Path) -> FileEntry:
    """Measure and hash one file."""
    with path.open("rb") as stream:
        return FileEntry(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def check_files(folder: Path, manifest: Manifest, *, hash_all: bool = False) -> None:
    """Compare a bundle's files with its manifest.

    Args:
        folder: The bundle.
        manifest: Its manifest.
        hash_all: Hash every file; otherwise sizes are checked for all files and hashes for those
            below `HASHED_ON_OPEN_BYTES`.

    Raises:
        BundleError: A file is missing or differs; names the file.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(
                f"The bundle {folder} is incomplete: {name} is missing. Copy it again from where "
                f"it came, or export the model again.",
                file=name,
            )
        size = path.stat().st_size
        if size != entry.size:
            raise BundleError(
                f"{name} in {folder} is damaged: it has {size} bytes, the manifest says "
                f"{entry.size}. Copy it again from where it came, or export the model again.",
                file=name,
            )
        if (hash_all or size < HASHED_ON_OPEN_BYTES) and file_entry(path) != entry:
            raise BundleError(
                f"{name} in {folder} is damaged: its sha256 differs from the manifest's. Copy it "
                f"again from where it came, or export the model again.",
                file=name,
            )


def _damaged(reason: str) -> BundleError:
    return BundleError(
        f"{MANIFEST_FILE} is damaged: {reason}. Copy the bundle again from where it came, or "
        f"export the model again.",
        file=MANIFEST_FILE,
    )


def from_json(hint: Any, value: Any, where: str) -> Any:
    """Turn parsed JSON into the type that a hint names: these dataclasses, or what they hold.

    Args:
        hint: A dataclass, or a type hint of a field.
        value: What `json.loads` gave for `dataclasses.asdict` of it.
        where: Names the place in errors.

    Raises:
        TypeError: A value has another type.
        ValueError: A key is missing or unknown, or a value is none of the allowed ones.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise TypeError(f"{where} must be an object, found {value!r}")
        hints = get_type_hints(hint)
        unknown, missing = value.keys() - hints.keys(), hints.keys() - value.keys() - _LATER_FIELDS
        if unknown or missing:
            raise ValueError(f"{where} lacks {sorted(missing)} or has unknown {sorted(unknown)}")
        fields = {name: from_json(hints[name], value[name], f"{where}.{name}") for name in value}
        return typing.cast(Any, hint)(**fields)
    if origin is types.UnionType:
        return None if value is None else from_json(arguments[0], value, where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {list(arguments)}, found {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{where} must be a list, found {value!r}")
        return tuple(from_json(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is collections.abc.Mapping:
        if not isinstance(value, dict):
            raise TypeError(f"{where} must be an object, found {value!r}")
        return {key: from_json(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    wanted: tuple[type, ...] = (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        raise TypeError(f"{where} must be {hint.__name__}, found {value!r}")
    return hint(value)
