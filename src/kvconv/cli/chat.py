"""`kvconv run --chat`: a conversation, one turn after the other."""

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvconv.cli.chat_commands import is_command, run_command
from kvconv.cli.chat_lines import Lines, open_lines
from kvconv.cli.common import one_line, print_status
from kvconv.cli.generation import gather
from kvconv.errors import KvconvError

if TYPE_CHECKING:
    from kvconv.runtime import Conversation, SamplingParams


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What one turn took.

    Attributes:
        prompt_tokens: Tokens of the history, up to where the answer begins.
        cached_tokens: Those of them that earlier turns had left in the cache.
        new_tokens: Tokens generated, the EOS token included.
        time_to_first_token_ms: From the encoded history to the first token, in ms.
        tokens_per_s: Of the tokens after the first; 0 where there are none.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    time_to_first_token_ms: float
    tokens_per_s: float


class Chat:
    """A conversation on the command line.

    Args:
        conversation: What turns are added to.
        params: How each answer is made.
        as_json: Print a JSON line per turn instead of streaming answers.
        with_stats: Print what each turn took to stderr, or into its JSON line.
    """

    def __init__(
        self,
        conversation: "Conversation",
        params: "SamplingParams",
        *,
        as_json: bool,
        with_stats: bool,
    ) -> None:
        self._conversation = conversation
        self._params = params
        self._as_json = as_json
        self._with_stats = with_stats

    def run(self, first: str | None) -> None:
        """Take turns until the user leaves.

        A person is told what was refused and goes on; a program's input ends at the first refusal.

        Args:
            first: What the user says first; None to read it.

        Raises:
            KvconvError: A turn or a command of a program was refused.
            KeyboardInterrupt: Ctrl-C during an answer to a program.
        """
        lines = open_lines()
        if lines.is_interactive and first is None:
            print_status(
                "Ctrl-D leaves the chat, Ctrl-C stops an answer, /help lists the commands."
            )
        is_going_on = True
        while is_going_on:
            try:
                if first is None:
                    is_going_on = self._take(lines)
                else:
                    text, first = first, None
                    self._turn(text, lines)
            except KvconvError as error:
                if not lines.is_interactive:
                    raise
                print_status(f"Error: {one_line(error)}")
            except KeyboardInterrupt:  # during a command, or again while one is reported
                if not lines.is_interactive:
                    raise
                print_status("")

    def _take(self, lines: Lines) -> bool:
        """Take what is said next; returns whether the chat goes on."""
        text = lines.read()
        if text is None:
            return False
        if is_command(text):
            try:
                report = run_command(text, self._conversation)
            except OSError as error:  # a file that a person can name otherwise
                raise KvconvError(one_line(error)) from error
            if report is not None:
                print_status(report)
            return report is not None
        if text.strip():
            self._turn(text.removeprefix("/") if text.startswith("//") else text, lines)
        return True

    def _turn(self, text: str, lines: Lines) -> None:
        num_before = len(self._conversation.messages)
        try:
            self._answer(text)
        except KeyboardInterrupt:
            if not lines.is_interactive:
                raise
            is_kept = len(self._conversation.messages) > num_before
            rest = "what was shown stays" if is_kept else "the turn was taken back"
            print_status(f"\nStopped; {rest}.")

    def _answer(self, text: str) -> None:
        with closing(self._conversation.say(text, self._params)) as events:
            answer = gather(events, is_streamed=not self._as_json)
        turn = self._conversation.turn
        assert turn is not None
        stats = TurnStats(
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            new_tokens=len(answer.token_ids),
            time_to_first_token_ms=1e3 * answer.first_s,
            tokens_per_s=answer.decode_tokens_per_s,
        )
        if self._as_json:
            answer.print_json(text, stats if self._with_stats else None)
        else:
            click.echo()
            if self._with_stats:
                _print_stats(stats)


def _print_stats(stats: TurnStats) -> None:
    print_status(
        f"cached: {stats.cached_tokens} tokens | prompt: "
        f"{stats.prompt_tokens - stats.cached_tokens} new tokens | first token after "
        f"{stats.time_to_first_token_ms:.0f} ms | new: {stats.new_tokens} tokens, "
        f"{stats.tokens_per_s:.1f} tokens/s"
    )
