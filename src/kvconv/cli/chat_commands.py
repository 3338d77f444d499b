"""What starts with a slash in a chat: changes the conversation instead of adding to it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvconv.cli.transcript import load, save
from kvconv.errors import PromptError

if TYPE_CHECKING:
    from kvconv.runtime import Conversation

_FORCE = "--force "


@dataclass(frozen=True, slots=True)
class _Command:
    """A command: its argument (`[X]` where it may be left out), and what it does and reports."""

    argument: str
    help: str
    run: Callable[["Conversation", str], str]


def is_command(text: str) -> bool:
    """Return whether a text is a command; two slashes say something that starts with one."""
    return text.startswith("/") and not text.startswith("//")


def run_command(text: str, conversation: "Conversation") -> str | None:
    """Run a command and return what to report; None to leave the chat.

    Raises:
        PromptError: There is no such command, or its argument cannot be used.
        OutputExistsError: A file would be replaced.
        OSError: A file cannot be read or written.
    """
    name, _, argument = text[1:].partition(" ")
    if name in ("exit", "quit"):
        return None
    command = _COMMANDS.get(name)
    if command is None:
        raise PromptError(
            f"There is no command /{name}; /help lists them. To say something that starts with a "
            f"slash, type two."
        )
    argument = argument.strip()
    is_missing = command.argument.isalpha() and argument in ("", _FORCE.strip())
    if is_missing or (argument and not command.argument):
        usage = f"/{name} {command.argument}".strip()
        raise PromptError(f"{text.strip()} is not how it is used: {usage}.")
    return command.run(conversation, argument)


def _help(_conversation: "Conversation", _argument: str) -> str:
    lines = [
        f"{f'/{name} {command.argument}':24}{command.help}" for name, command in _COMMANDS.items()
    ]
    lines += [
        f"{'/exit':24}Leave, as Ctrl-D does.",
        "A line that ends in \\ goes on in the next; // says a text that starts with a slash.",
    ]
    return "\n".join(lines)


def _system(conversation: "Conversation", text: str) -> str:
    conversation.set_system(text)
    return "The system message is set." if text else "There is no system message now."


def _undo(conversation: "Conversation", _argument: str) -> str:
    return "The last turn is taken back." if conversation.undo() else "There is no turn yet."


def _reset(conversation: "Conversation", _argument: str) -> str:
    conversation.reset()
    return "All turns are forgotten; a system message stays."


def _save(conversation: "Conversation", argument: str) -> str:
    path = _path(argument.removeprefix(_FORCE).strip())
    save(conversation.messages, path, overwrite=argument.startswith(_FORCE))
    return f"{len(conversation.messages)} messages are in {path}."


def _load(conversation: "Conversation", argument: str) -> str:
    messages = load(_path(argument))
    if messages:
        conversation.encode(messages)  # refused now rather than at the next turn
    conversation.messages[:] = messages
    return f"{len(messages)} messages are loaded."


def _path(text: str) -> Path:
    # Unlike Path.expanduser it leaves the ~ of an unknown user alone.
    return Path(os.path.expanduser(text))


_COMMANDS = {
    "help": _Command("", "List the commands.", _help),
    "system": _Command("[TEXT]", "Set the system message; without a text, remove it.", _system),
    "undo": _Command("", "Take back the last turn.", _undo),
    "reset": _Command("", "Forget all turns.", _reset),
    "save": _Command("FILE", "Write the messages as JSON; --force FILE replaces a file.", _save),
    "load": _Command("FILE", "Go on from messages that /save wrote.", _load),
}
