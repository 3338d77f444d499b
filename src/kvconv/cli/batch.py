"""Many prompts of `kvconv run --prompts`: run in batches, printed in the order they came."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvconv.cli.common import print_json, print_status
from kvconv.cli.generation import print_memory

if TYPE_CHECKING:
    from kvconv.cli.prompts import FilePrompt
    from kvconv.runtime import GenerationEvent, Generator


def run_prompts(
    generator: "Generator",
    prompts: Sequence["FilePrompt"],
    *,
    batch_size: int,
    chat_template: bool,
    with_stats: bool,
) -> None:
    """Generate for all prompts and print one JSON line for each, as early as its turn allows.

    Args:
        generator: The model.
        prompts: One or more.
        batch_size: Most prompts in one batch.
        chat_template: Wrap plain prompts as one user turn.
        with_stats: Write totals to stderr at the end.

    Raises:
        PromptError: A prompt cannot be encoded or does not fit; nothing has run or been printed.
        MemoryError: The cache of a batch takes more than the machine has; likewise.
    """
    from kvconv.runtime import plan_batches

    prompt_ids = [prompt.encode(generator, chat_template=chat_template) for prompt in prompts]
    batches = plan_batches(
        [len(ids) for ids in prompt_ids],
        [prompt.params for prompt in prompts],
        batch_size=batch_size,
        max_sequence_length=generator.max_sequence_length,
    )
    for batch in batches:
        generator.check([prompt_ids[i] for i in batch], [prompts[i].params for i in batch])
    writer = _InOrder()
    new_tokens = kv_cache_bytes = 0
    started = time.perf_counter()
    with _progress_bar(len(prompts)) as progress:
        for batch in batches:
            batch_ids = [prompt_ids[i] for i in batch]
            params = [prompts[i].params for i in batch]
            cache = generator.new_cache(batch_ids, params)
            for row, result in _finished_rows(generator.generate(batch_ids, params, cache=cache)):
                writer.add(batch[row], {**prompts[batch[row]].labels, **result})
                new_tokens += len(result["token_ids"])
                progress.advance(progress.task_ids[0])
            kv_cache_bytes = max(kv_cache_bytes, cache.nbytes)
    if with_stats:
        seconds = time.perf_counter() - started
        print_status(
            f"prompts: {len(prompts)} in {len(batches)} batches, "
            f"{sum(map(len, prompt_ids))} tokens | "
            f"new: {new_tokens} tokens, {new_tokens / seconds:.1f} tokens/s | {seconds:.2f} s"
        )
        print_memory(kv_cache_bytes)


def _finished_rows(events: Iterable["GenerationEvent"]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a batch with its result, as it ends."""
    token_ids: dict[int, list[int]] = {}
    pieces: dict[int, list[str]] = {}
    for event in events:
        token_ids.setdefault(event.row, []).append(event.token_id)
        pieces.setdefault(event.row, []).append(event.text)
        if event.finish_reason is not None:
            yield (
                event.row,
                {
                    "text": "".join(pieces.pop(event.row)),
                    "token_ids": token_ids.pop(event.row),
                    "finish_reason": event.finish_reason,
                },
            )


class _InOrder:
    """Prints results by their index from 0, each as soon as all before it are printed."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0

    def add(self, index: int, result: dict[str, Any]) -> None:
        """Take one result and print all whose turn has come."""
        self._waiting[index] = result
        while self._next in self._waiting:
            with _ctrl_c_waits():
                print_json(self._waiting.pop(self._next))
            self._next += 1


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let the block end before Ctrl-C takes effect: a slow reader must not be left half a line."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _progress_bar(num_prompts: int) -> Iterator[Progress]:
    """Show how many prompts are done: on a terminal that does not show the results themselves."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,  # the results are not for this console
        disable=not console.is_terminal or sys.stdout.isatty(),
    ) as progress:
        progress.add_task("prompts", total=num_prompts)
        yield progress
