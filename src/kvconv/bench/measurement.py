"""Timed runs of one bundle through the runtime that ships: prefill, decode, sampling and text."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvconv.bench.sample import Load, Sample
from kvconv.errors import CacheFullError, PromptError
from kvconv.manifest import Provider
from kvconv.memory import peak_rss_mb, reset_peak_rss
from kvconv.runtime import Bundle, Generator, SamplingParams, Session
from kvconv.runtime.tokenizer import Tokenizer

_SETTLE_S = 0.1
"""Before each run: threads of the run before (or of another session) may still spin."""
_WARM_UP_TOKENS = 32
_WARM_UP_STEPS = 4


class Measurement:
    """Times runs of a bundle, greedily and without an end at EOS.

    Args:
        generator: Whose session knows no EOS ids; `open` makes one.

    Attributes:
        generator: As given.
    """

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        use_bundle_library: bool = False,
        prefill_chunk: int | None = None,
        spin: bool = True,
        profile: Path | None = None,
        provider: Provider = "cpu",
        cuda_graph: bool = True,
    ) -> "Measurement":
        """Load a bundle.

        Args:
            path: The bundle.
            threads: See `Session`.
            use_bundle_library: See `Session`.
            prefill_chunk: See `Generator`.
            spin: See `Session`.
            profile: See `Session`.
            provider: See `Session`.
            cuda_graph: See `Session`.

        Raises:
            BundleError: The bundle is missing or damaged.
            LibraryError: The op library is absent or does not suit.
            ProviderError: The provider is not available.
        """
        bundle = Bundle.open(path)
        manifest = dataclasses.replace(bundle.manifest, eos_token_ids=())
        session = Session(
            dataclasses.replace(bundle, manifest=manifest),
            threads=threads,
            use_bundle_library=use_bundle_library,
            profile=profile,
            spin=spin,
            provider=provider,
            cuda_graph=cuda_graph,
        )
        return cls(Generator(session, Tokenizer.open(bundle), prefill_chunk=prefill_chunk))

    def check(self, contexts: Sequence[int], *, gen: int, batch: int) -> None:
        """Refuse what cannot run; runs nothing.

        Raises:
            CacheFullError: A context and its new tokens are more than the model holds.
            FlavourError: The bundle takes no chunks of the size asked for.
            MemoryError: The machine has less memory than the full cache takes.
        """
        limit = self.generator.max_sequence_length
        for context in contexts:
            needed = context + gen + 1
            if needed > limit:
                deepest = limit - gen - 1
                remedy = f"--depths of at most {deepest}, or " if deepest > 0 else ""
                raise CacheFullError(
                    f"A depth of {context} tokens, the first new one and {gen} more take {needed} "
                    f"cache slots, and this bundle holds at most {limit}. Choose {remedy}fewer "
                    f"tokens with --gen.",
                    needed=needed,
                    capacity=limit,
                )
            self.generator.chunk_tokens(batch, context)
            self.generator.session.check_cache(batch, needed)

    def prompts(self, context: int, batch: int) -> npt.NDArray[np.int64]:
        """Return the same random ids in every process, none of them special.

        Args:
            context: Tokens per row.
            batch: Rows, each different.

        Returns:
            [batch, context] int64.

        Raises:
            PromptError: The tokenizer has special tokens only.
        """
        tokenizer = self.generator.tokenizer
        vocab_size = self.generator.session.manifest.vocab_size
        ids = [i for i in range(vocab_size) if not tokenizer.is_silent(i)]
        if not ids:
            raise PromptError("The bundle's tokenizer has no token with a text to make prompts of.")
        return np.random.default_rng(0).choice(np.array(ids, np.int64), (batch, context))

    def warm_up(self, batch: int) -> None:
        """Run a little of both phases, untimed: threads start, memory arenas grow."""
        limit = self.generator.max_sequence_length  # at least 3, as `check` has found
        steps = min(_WARM_UP_STEPS, limit - 2)
        self.run(self.prompts(min(_WARM_UP_TOKENS, limit - steps - 1), batch), steps)

    def run(self, prompts: npt.NDArray[np.int64], gen: int) -> Sample:
        """Run once.

        Args:
            prompts: [batch, context] int64.
            gen: Ids per row behind the first new one, >= 1.

        Raises:
            CacheFullError: It does not fit; nothing has run.
        """
        batch, context = prompts.shape
        self.check([context], gen=gen, batch=batch)
        time.sleep(_SETTLE_S)
        has_peak = reset_peak_rss()
        rows: list[list[int]] = prompts.tolist()
        token_ids: list[int] = []
        with Load.during() as load:
            prefill_s = 0.0
            started = first = last = time.perf_counter()
            first_peak = None
            events = self.generator.generate(rows, SamplingParams(max_new_tokens=gen + 1))
            for event in events:
                if event.row == 0:
                    token_ids.append(event.token_id)
                if event.row == batch - 1:
                    last = time.perf_counter()
                    if len(token_ids) == 1:
                        first_peak = peak_rss_mb()
                        first = time.perf_counter()
                        prefill_s = last - started
        return Sample(
            context=context,
            batch=batch,
            prefill_s=prefill_s,
            decode_s=last - first,
            token_ids=tuple(token_ids),
            prefill_peak_rss_mb=first_peak if has_peak else None,
            peak_rss_mb=peak_rss_mb() if has_peak else None,
            other_cores=load.cores,
        )
