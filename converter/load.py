"""Loads a decoder and its tokenizer from a hub id, a local folder or a GGUF file.

Everything that can be refused from the config alone is refused before any weight is read. A model
with missing weights is refused too: transformers would fill them with random numbers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvconv.converter import hub
from kvconv.converter.checkpoint_files import (
    check_small_files,
    check_weight_files,
    require_weight_files,
    weight_files,
)
from kvconv.converter.damage import damaged_files
from kvconv.converter.gguf_reading import fast_reading, metadata
from kvconv.converter.model_name import ModelName, parse_model_name
from kvconv.converter.quiet import quiet
from kvconv.converter.tokenizer import load_tokenizer
from kvconv.errors import ModelNotFoundError, UnsupportedModelError
from kvconv.manifest import Source
from kvconv.memory import release_memory


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder in memory, on the CPU and in eval mode.

    Attributes:
        model: Weights at the dtype asked for; its `generation_config` is the checkpoint's.
        tokenizer: None when the checkpoint has none.
        source: Where it came from; without the path that led there.
        gguf: The GGUF file that it is, if it is one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    source: Source
    gguf: Path | None = None


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Files on this machine: a folder, and the GGUF file in it if that is the model."""

    folder: Path
    gguf_file: str | None
    source: Source

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, if it is one."""
        return None if self.gguf_file is None else self.folder / self.gguf_file

    def arguments(self, *, trust_remote_code: bool) -> dict[str, Any]:
        """Return what every `from_pretrained` needs to read these files and no others."""
        arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments


def fetch(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> str | None:
    """Make sure that all files of a model are on this machine; see `load_model`.

    Returns:
        The commit of a hub model, to be given to `load_model` as revision; None for local ones.

    Raises:
        ModelNotFoundError: There is no such model, or its files are incomplete or damaged.
        UnsupportedModelError: It is no decoder, is quantised, or needs code that is not trusted.
        ExportError: The disk has no room for its weights.
    """
    name = parse_model_name(model, revision)
    return _prepare(name, revision, cache_dir, trust_remote_code)[0].source.revision


def load_skeleton(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Make a decoder without weights from its config alone; its tensors are on the meta device.

    Of a hub model only config.json is fetched, and of a GGUF file only the header is read. What
    `load_model` judges by the config is refused here too.

    Args:
        model: As for `load_model`, as are the others.
        revision: See there.
        cache_dir: See there.
        trust_remote_code: See there.

    Raises:
        ModelNotFoundError: There is no such model, or its config is damaged.
        UnsupportedModelError: It is no decoder, is quantised, or needs code that is not trusted.
    """
    name = parse_model_name(model, revision)
    with fast_reading(remember=True):
        checkpoint = _find(name, revision, cache_dir, config_only=True)
        config = _read_config(name.text, checkpoint, trust_remote_code)
        with quiet(), damaged_files(model), torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
            )
    return LoadedModel(
        decoder.eval().requires_grad_(False), None, checkpoint.source, checkpoint.gguf
    )


def load_model(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
) -> LoadedModel:
    """Load a decoder, widened or narrowed to one dtype while it is read.

    Args:
        model: Hub id, folder, or `.gguf` file. A path that exists wins over a hub id.
        revision: Branch, tag or commit of a hub model.
        cache_dir: Where hub files are kept; None is Hugging Face's own cache.
        trust_remote_code: Whether Python code that comes with the model may run.
        dtype: `float32` or `float16`.

    Raises:
        ModelNotFoundError: There is no such model, or its files are incomplete or damaged.
        UnsupportedModelError: It is no decoder, is quantised, or needs code that is not trusted.
        ExportError: The disk has no room for the weights of a hub model.
    """
    name = parse_model_name(model, revision)
    with fast_reading(remember=True):
        checkpoint, config = _prepare(name, revision, cache_dir, trust_remote_code)
        arguments = checkpoint.arguments(trust_remote_code=trust_remote_code)
        with quiet(), damaged_files(model):
            decoder, report = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=config,
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with both shapes
                **arguments,
            )
    _check_complete(model, report)
    # After the weights, whose reading takes most memory, and without what it remembered: making a
    # tokenizer of a large vocabulary takes almost as much.
    release_memory()
    with fast_reading(remember=False):
        tokenizer = load_tokenizer(model, checkpoint.folder, **arguments)
    if checkpoint.gguf_file is not None:
        # The weights are plain floats now; what still says otherwise would forbid saving.
        decoder.hf_quantizer = None
        del decoder.config.quantization_config
    decoder.eval().requires_grad_(False)
    return LoadedModel(decoder, tokenizer, checkpoint.source, checkpoint.gguf)


def _prepare(
    name: ModelName, revision: str | None, cache_dir: Path | None, trust_remote_code: bool
) -> tuple[_Checkpoint, PreTrainedConfig]:
    """Bring all files here, the weights only after the config has been judged."""
    checkpoint = _find(name, revision, cache_dir)
    if checkpoint.gguf_file is None:
        check_small_files(name.text, checkpoint.folder)
    config = _read_config(name.text, checkpoint, trust_remote_code)
    if checkpoint.gguf_file is None:
        if name.kind == "hub":
            hub.fetch_weights(name.location, checkpoint.folder, cache_dir)
        here = [path.name for path in checkpoint.folder.iterdir()]
        wanted = weight_files(name.text, checkpoint.folder, here)
        require_weight_files(name.text, wanted, here, remedy="Download the model again.")
        check_weight_files(name.text, checkpoint.folder, wanted)
    return checkpoint, config


def _read_config(model: str, checkpoint: _Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the config of what turned out to be a decoder."""
    arguments = checkpoint.arguments(trust_remote_code=trust_remote_code)
    with quiet(), damaged_files(model):
        config = AutoConfig.from_pretrained(checkpoint.folder, **arguments)
    _check_decoder(model, config)
    return config


def _find(
    name: ModelName, revision: str | None, cache_dir: Path | None, *, config_only: bool = False
) -> _Checkpoint:
    path, file = Path(name.location), name.hub_file
    if name.kind == "gguf":
        path, file = path.parent, path.name
    elif name.kind == "hub":
        path = (
            hub.fetch_small_files(name.location, revision, cache_dir, config_only=config_only)
            if file is None
            else hub.fetch_gguf_file(
                name.location, file, revision, cache_dir, only_cached=config_only
            )
        )
    license_name = None if name.kind == "gguf" else hub.license_of(path)
    if file is not None:
        with damaged_files(name.text):
            license_name = license_name or metadata(path / file, "general.license")
            num_parts = int(metadata(path / file, "split.count") or 1)
        if num_parts > 1:
            raise UnsupportedModelError(
                f"{name.text} is one of {num_parts} parts of a model. Join them first "
                f"(llama-gguf-split --merge), and give the whole file."
            )
    if name.kind == "hub":
        return _Checkpoint(path, file, Source(name.text, "hub", path.name, license_name))
    # Resolved: `.` and `..` have no name. The rest of the path says nothing on another machine.
    local_name = file or path.resolve().name
    return _Checkpoint(path, file, Source(local_name, name.kind, license=license_name))


def _check_decoder(model: str, config: PreTrainedConfig) -> None:
    """Refuse what is not a decoder, judging by the class that the checkpoint was saved from."""
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    architectures = config.architectures or ()
    if isinstance(architectures, str):
        architectures = [architectures]
    if architectures and not has_own_code and not known.intersection(architectures):
        has_decoder = hasattr(config, "text_config")
        hint = " Its decoder, saved as a model of its own, could be converted."
        raise UnsupportedModelError(
            f"{model} is {_article(architectures[0])} {architectures[0]}, not a decoder that "
            f"generates text. kvconv converts causal language models, whose architecture usually "
            f"ends in ForCausalLM.{hint if has_decoder else ''}",
            model_type=config.model_type,
        )
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):
        # bitsandbytes did not name itself at first.
        is_old = "load_in_4bit" in quantization or "load_in_8bit" in quantization
        default = "bitsandbytes" if is_old else "an unknown method"
        raise UnsupportedModelError(
            f"{model} is quantised with {quantization.get('quant_method', default)}. Give the "
            f"unquantised model that it was made from, or a .gguf file.",
            model_type=config.model_type,
        )


def _article(noun: str) -> str:
    return "an" if noun[0] in "AEIOU" else "a"


def _check_complete(model: str, report: dict[str, Any]) -> None:
    """Refuse weights that transformers had to make up."""
    for key, found, expected in sorted(report["mismatched_keys"]):
        raise ModelNotFoundError(
            f"The weights of {model} do not fit its config: {key} is {tuple(found)} in the file "
            f"and {tuple(expected)} by config.json. Download the model again.",
            model=model,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelNotFoundError(
            f"The weights of {model} are incomplete: {len(missing)} are missing, for example "
            f"{missing[0]}. Download the model again.",
            model=model,
        )
