"""Says what is wrong when transformers cannot use a model's files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvconv.errors import KvconvError, ModelNotFoundError, UnsupportedModelError, root_cause


@contextlib.contextmanager
def damaged_files(model: str, files: str = "files") -> Iterator[None]:
    """Turn what transformers raises about unusable files into one sentence and a remedy.

    Its readers raise whatever their parsers raise, so every exception that is not about this
    machine (memory, permissions) counts as a statement about the files; the cause is kept.

    Args:
        model: What the user calls the model.
        files: What is being read, in the plural.

    Raises:
        ModelNotFoundError: The files are damaged or incomplete.
        UnsupportedModelError: They need code that is not trusted or not installed.
    """
    is_gguf = Path(model).suffix == ".gguf"
    try:
        yield
    except (MemoryError, PermissionError, ModuleNotFoundError, KvconvError):
        raise
    except ImportError as error:
        raise UnsupportedModelError(
            f"{model} needs packages that are not installed: {root_cause(error)}"
        ) from error
    except Exception as error:
        text = str(error)
        if "DefaultCPUAllocator" in text:  # PyTorch has no exception of its own for it
            raise MemoryError(root_cause(error)) from error
        if "weights_only" in text:
            raise UnsupportedModelError(
                f"The weights of {model} are a Python pickle that holds more than tensors; loading "
                f"it could run code. Give a model with safetensors."
            ) from error
        if "trust_remote_code" in text:
            raise UnsupportedModelError(
                f"{model} comes with Python code of its own. Read that code, and if you trust it "
                f"pass --trust-remote-code."
            ) from error
        if "does not recognize" in text or "is not supported yet" in text:
            raise UnsupportedModelError(
                f"The installed transformers does not know {model}: {root_cause(error)} Upgrade "
                f"transformers if a newer one knows it."
            ) from error
        # What a GGUF reader trips over says nothing to a person; --debug shows it.
        reason = "it ends too early, or is no GGUF file." if is_gguf else root_cause(error)
        if reason.startswith("Couldn't instantiate the backend tokenizer"):
            reason = "the vocabulary is missing."
        raise ModelNotFoundError(
            f"The {files} of {model} are damaged or incomplete: {reason} Download the model again.",
            model=model,
        ) from error
