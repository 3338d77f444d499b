"""What PyTorch says about the sequences of the checks, and its way to the process that checks."""

import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kvconv.errors import KvconvError

FloatArray = npt.NDArray[np.float32]

MAX_LOGITS = 2**22
"""Logits kept per check, rows x vocab_size: 16 MB in float32."""


@dataclass(frozen=True)
class Continuation:
    """Token ids and PyTorch's logits at some of their positions.

    Attributes:
        input_ids: The whole sequence, from its first token.
        positions: Indices into `input_ids`, ascending; the last one is the last token's.
        logits: [len(positions), vocab_size] float32, row i for the token after positions[i].
    """

    input_ids: list[int]
    positions: list[int]
    logits: FloatArray


@dataclass(frozen=True)
class Reference:
    """What PyTorch says about every sequence that the checks run.

    Attributes:
        prompt: The prompt, with logits at positions spread over it and at its end, as many as
            MAX_LOGITS allows.
        decoded: The prompt and up to DECODE_STEPS greedy tokens, with the logits of the latter.
        rows: Rows of the padded batch: a prompt and up to BATCH_DECODE_STEPS greedy tokens each,
            with the logits of the last prompt position and of the tokens. Empty for a model that
            padding changes.
        reprompted: The first half of the prompt and another continuation, with its last logits.
        not_checked: Sentences about what the prompt does not reach.
        float_logits: The prompt's logits before the weights were rounded to those of the bundle;
            None if PyTorch's weights are as they were.
    """

    prompt: Continuation
    decoded: Continuation
    rows: tuple[Continuation, ...]
    reprompted: Continuation
    not_checked: tuple[str, ...]
    float_logits: FloatArray | None = None

    @property
    def parts(self) -> tuple[Continuation, ...]:
        """All sequences, in the order in which they are stored."""
        return (self.prompt, self.decoded, self.reprompted, *self.rows)

    @property
    def spread(self) -> float:
        """How far PyTorch's logits are apart: their standard deviation over the vocabulary.

        A mean over positions, of the sequence where it is smallest; so a shift of all logits,
        which changes no probability, does not count.
        """
        return min(
            float(np.mean([row.std(dtype=np.float64) for row in part.logits]))
            for part in self.parts
        )

    def save(self, file: BinaryIO) -> None:
        """Write what `load` reads, in the .npz format."""
        arrays: dict[str, npt.NDArray[Any]] = {"not_checked": np.array(self.not_checked, np.str_)}
        if self.float_logits is not None:
            arrays["float_logits"] = self.float_logits
        for index, part in enumerate(self.parts):
            arrays[f"{index}.input_ids"] = np.array(part.input_ids, np.int64)
            arrays[f"{index}.positions"] = np.array(part.positions, np.int64)
            arrays[f"{index}.logits"] = part.logits
        np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, file: BinaryIO) -> "Reference":
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            prompt, decoded, reprompted, *rows = [
                Continuation(
                    arrays[f"{index}.input_ids"].tolist(),
                    arrays[f"{index}.positions"].tolist(),
                    arrays[f"{index}.logits"],
                )
                for index in range(len(arrays.files) // 3)
            ]
            not_checked = tuple(arrays["not_checked"].tolist())
            float_logits = arrays["float_logits"] if "float_logits" in arrays.files else None
        return cls(prompt, decoded, tuple(rows), reprompted, not_checked, float_logits)


class StoredReference:
    """A reference on disk, for the process that checks.

    The file has no name, so nothing is left of it however this process ends.

    Raises:
        KvconvError: The folder for temporary files cannot take it.
    """

    def __init__(self, reference: Reference) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="kvconv-verify-")
            reference.save(self._file)
            self._file.flush()
        except OSError as error:
            raise KvconvError(
                f"The folder for temporary files, {tempfile.gettempdir()}, cannot take what "
                f"PyTorch computed for verification: {error.strerror}. Set TMPDIR to another "
                f"folder, or pass --no-verify."
            ) from error

    def rewound(self) -> BinaryIO:
        """Return the file, at its start: what `Reference.load` reads."""
        self._file.seek(0)
        return self._file
