"""What the argument MODEL names, told from its spelling and the file system alone.

Imports nothing heavy, so that a path that is not there is refused at once, before PyTorch and
transformers are imported. Whether a hub model exists only the hub knows.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvconv.errors import ModelNotFoundError
from kvconv.names import MANIFEST_FILE

CONFIG_FILE = "config.json"

_HUB_ID = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/((?:[\w -][\w. -]*/)*[\w -][\w. -]*\.gguf)")


@dataclass(frozen=True, slots=True)
class ModelName:
    """What a MODEL argument names.

    Attributes:
        text: The argument itself.
        kind: A local folder, a local GGUF file, or a model on the hub.
        location: Path of the folder or file, or hub id.
        hub_file: The GGUF file in the hub's repository, if that is the model.
    """

    text: str
    kind: Literal["folder", "gguf", "hub"]
    location: str
    hub_file: str | None = None


def parse_model_name(model: str, revision: str | None = None) -> ModelName:
    """Tell what a MODEL argument names; a path that exists wins over a hub id.

    Args:
        model: Hub id, `OWNER/NAME/FILE.gguf` for a GGUF file on the hub, folder, or `.gguf` file.
        revision: Branch, tag or commit; local models have none.

    Raises:
        ModelNotFoundError: It is no hub id, and there is no such path or no model in it.
    """
    path = Path(os.path.expanduser(model))  # the ~ of an unknown user stays
    if not model or not path.exists():
        return _parse_hub_name(model)
    if revision is not None:
        raise ModelNotFoundError(
            f"{model} is a local path, which has no revision {revision!r}. Leave --revision out, "
            f"or give a hub id.",
            model=model,
        )
    if path.is_dir():
        _check_folder(model, path)
        return ModelName(model, "folder", str(path))
    if path.suffix != ".gguf":
        raise ModelNotFoundError(
            f"{model} is a file, but not a .gguf file. Give the folder that holds the model's "
            f"{CONFIG_FILE}, or a .gguf file.",
            model=model,
        )
    return ModelName(model, "gguf", str(path))


def _parse_hub_name(model: str) -> ModelName:
    hub_file = _HUB_FILE.fullmatch(model)
    if hub_file is not None:
        return ModelName(model, "hub", hub_file[1], hub_file=hub_file[2])
    if _HUB_ID.fullmatch(model) is None or model.endswith(".gguf"):
        raise ModelNotFoundError(
            f"There is no file or folder {model!r}. Give a folder with a {CONFIG_FILE}, a .gguf "
            f"file, a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, or OWNER/NAME/FILE.gguf "
            f"for a file on the hub.",
            model=model,
        )
    return ModelName(model, "hub", model)


def _check_folder(model: str, path: Path) -> None:
    if (path / MANIFEST_FILE).is_file():
        raise ModelNotFoundError(
            f"{model} is a bundle already: it holds a {MANIFEST_FILE}. Give the model that it was "
            f"made from.",
            model=model,
        )
    if (path / CONFIG_FILE).is_file():
        return
    gguf_files = sorted(file.name for file in path.glob("*.gguf"))
    hint = f" Did you mean {path / gguf_files[0]}?" if gguf_files else ""
    raise ModelNotFoundError(
        f"{model} holds no {CONFIG_FILE}, so it is not a Hugging Face model folder.{hint} Give a "
        f"folder made by save_pretrained, or a .gguf file.",
        model=model,
    )
