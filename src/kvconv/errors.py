"""Every error kvconv raises for a person to read.

The message says what was wrong with the values and what to do; the same facts are attributes, so
that programs and tests need not parse prose. The command line prints the message as one line.
"""

from collections.abc import Sequence


class KvconvError(Exception):
    """Base of all errors meant for a person; the message is complete sentences."""


class UnsupportedModelError(KvconvError):
    """The model is not a decoder, or has a feature that kvconv does not model."""

    def __init__(self, message: str, *, model_type: str | None = None) -> None:
        super().__init__(message)
        self.model_type = model_type


class ModelNotFoundError(KvconvError):
    """The model id, folder or file does not exist, is incomplete or is damaged."""

    def __init__(self, message: str, *, model: str) -> None:
        super().__init__(message)
        self.model = model


class ExportError(KvconvError):
    """Tracing, converting or writing the model failed; chains the cause."""


class RewriteError(KvconvError):
    """The graph holds attention that no rule could rewrite.

    Attributes:
        expected: Matches wanted.
        found: Matches made.
        refusals: One sentence per refusal, naming the node.
    """

    def __init__(
        self, message: str, *, expected: int = 0, found: int = 0, refusals: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found
        self.refusals = tuple(refusals)


class VerificationError(KvconvError):
    """A bundle's logits differ from PyTorch's by more than the dtype's tolerance.

    Attributes:
        check: Name of the check that failed, for example `chunked prefill`.
        max_abs: Largest absolute logit difference.
        tolerance: Largest difference allowed.
        exceeded: Every limit that was exceeded, with the value found.
    """

    def __init__(
        self,
        message: str,
        *,
        check: str,
        max_abs: float,
        tolerance: float,
        exceeded: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.check = check
        self.max_abs = max_abs
        self.tolerance = tolerance
        self.exceeded = tuple(exceeded)


class BundleError(KvconvError):
    """A bundle is missing, damaged, or written by a newer kvconv.

    Attributes:
        file: The file at fault, relative to the bundle, or the bundle's path.
    """

    def __init__(self, message: str, *, file: str) -> None:
        super().__init__(message)
        self.file = file


class RewindError(KvconvError):
    """A cache no longer holds what a token behind the wanted length would see.

    Attributes:
        length: Tokens that were to stay.
        shortest: Least number of tokens, other than 0, that may stay.
    """

    def __init__(self, message: str, *, length: int, shortest: int) -> None:
        super().__init__(message)
        self.length = length
        self.shortest = shortest


class OutputExistsError(KvconvError):
    """The output path exists, cannot be written, or is not a bundle that may be replaced."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LibraryError(KvconvError):
    """The op library is absent, has the wrong version, or ONNX Runtime refuses it."""


class CacheFullError(KvconvError):
    """A prompt or a run needs more cache slots than the buffers hold; nothing was written.

    Attributes:
        needed: Slots wanted, in tokens.
        capacity: Slots there are, in tokens.
    """

    def __init__(self, message: str, *, needed: int, capacity: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity


class NotEnoughMemoryError(KvconvError, MemoryError):
    """The weights, or a cache and what a run takes, are more than is free; nothing was allocated.

    Attributes:
        needed_bytes: Bytes wanted.
        free_bytes: Bytes there are.
    """

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class FlavourError(KvconvError):
    """A run has something that the bundle's attention flavour does not take; nothing has run.

    Attributes:
        attention: The flavour.
    """

    def __init__(self, message: str, *, attention: str) -> None:
        super().__init__(message)
        self.attention = attention


class PromptError(KvconvError):
    """A prompt cannot be used: it is empty, or the bundle has no chat template for it."""


class ProviderError(KvconvError):
    """An execution provider is not available.

    Attributes:
        provider: The one asked for.
        available: Those that this machine has.
    """

    def __init__(self, message: str, *, provider: str, available: Sequence[str]) -> None:
        super().__init__(message)
        self.provider = provider
        self.available = tuple(available)


class MissingDependencyError(KvconvError):
    """A package of an extra that was not installed is needed.

    Attributes:
        package: The import that failed.
        extra: The extra that brings it.
    """

    def __init__(self, *, package: str, extra: str) -> None:
        super().__init__(
            f"The package {package!r} is not installed. "
            f'Install it with: pip install "kvconv[{extra}]"'
        )
        self.package = package
        self.extra = extra


def root_cause(error: BaseException) -> str:
    """Return what an error's innermost cause says, cut to one line that ends like a sentence."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
