"""Keeps notes that libraries write about their own internals off the user's screen."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator

import tqdm  # type: ignore[import-untyped]

from kvconv.converter.swapped import swapped

_LOGGERS = ("torch.onnx", "transformers", "huggingface_hub", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet(*, progress: bool = False) -> Iterator[None]:
    """Silence warnings, informative log records and progress bars of the libraries we drive.

    Args:
        progress: Leave the progress bars: something long is being waited for.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    # transformers has a switch for its bars, but reading GGUF goes past it.
    hidden = functools.partialmethod(tqdm.tqdm.__init__, disable=True)
    no_bars = contextlib.nullcontext() if progress else swapped(tqdm.tqdm, __init__=hidden)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), no_bars:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
