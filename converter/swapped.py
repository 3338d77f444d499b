"""Puts something else in the place of another object's attributes, and puts them back."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def swapped(owner: Any, **replacements: Any) -> Iterator[None]:
    """Give a module, class or object other attributes for as long as the block runs."""
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
