"""`kvconv run --chat`: piped in process, and typed into a real terminal, signals included."""

import contextlib
import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvconv.cli import main
from kvconv.runtime import Conversation, Generator, SamplingParams
from tiny_bundle import letter_decoder, write_bundle

# The tiny model holds 64 tokens, so its template is terse.
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"
THINKS = "{% if enable_thinking %}T{% endif %}" + TEMPLATE
FOUR = ("--max-new-tokens", "4")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    return str(write_bundle(folder, decoder=letter_decoder(), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "thinker"
    return str(write_bundle(folder, decoder=letter_decoder(), chat_template=THINKS))


def answers(bundle: str, *turns: str, system: str | None = None) -> list[str]:
    """Return what the library answers."""
    messages = [{"role": "system", "content": system}] if system else []
    conversation = Conversation(Generator.open(bundle, threads=1), messages)
    params = SamplingParams(max_new_tokens=4)
    return ["".join(event.text for event in conversation.say(turn, params)) for turn in turns]


def chat(bundle: str, *arguments: str, **options):
    return CliRunner().invoke(main, ["run", bundle, "--chat", *FOUR, *arguments], **options)


def test_piped_lines_are_turns_and_only_answers_are_printed(bundle):
    result = chat(bundle, input="Hi\n\nWho?\n")
    first, second = answers(bundle, "Hi", "Who?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{first}\n{second}\n", "")
    assert first.isalpha()


def test_prompt_is_the_first_turn(bundle):
    result = chat(bundle, "Hi", input="Who?")
    assert result.stdout.split() == answers(bundle, "Hi", "Who?")
    assert chat(bundle, "-", input="Hi\n").stdout.split() == answers(bundle, "Hi")


def test_byte_order_mark_and_dos_line_ends_are_not_part_of_a_turn(bundle):
    result = chat(bundle, "--json", input=b"\xef\xbb\xbfHi\r\nWho?\r\n")
    prompts = [json.loads(line)["prompt"] for line in result.stdout.splitlines()]
    assert prompts == ["Hi", "Who?"]


def test_backslash_continues_a_line_and_two_slashes_begin_a_text(bundle):
    result = chat(bundle, "--json", input="a\\\nb\\\n\n//x\nc\\")
    prompts = [json.loads(line)["prompt"] for line in result.stdout.splitlines()]
    assert prompts == ["a\nb\n", "/x", "c"]


def test_json_is_one_line_a_turn(bundle):
    result = chat(bundle, "--json", "--stats", input="Hi\nWho?\n")
    first, second = map(json.loads, result.stdout.splitlines())
    assert [first["text"], second["text"]] == answers(bundle, "Hi", "Who?")
    assert set(first) == {"prompt", "text", "token_ids", "finish_reason", "stats"}
    assert set(first["stats"]) == {
        "prompt_tokens",
        "cached_tokens",
        "new_tokens",
        "time_to_first_token_ms",
        "tokens_per_s",
    }
    assert first["stats"]["prompt_tokens"] == len("uHi|")
    assert first["stats"]["cached_tokens"] == 0
    assert second["stats"]["prompt_tokens"] == len("uHi|aXXXX|uWho?|")
    # The last token of an answer was never run.
    assert second["stats"]["cached_tokens"] >= len("uHi|")
    assert second["stats"]["new_tokens"] == len(second["token_ids"]) == 4
    assert second["stats"]["time_to_first_token_ms"] > 0
    assert result.stderr == ""
    assert "stats" not in json.loads(chat(bundle, "Hi", "--json", input="").stdout)


def test_stats_of_each_turn_go_to_stderr(bundle):
    result = chat(bundle, "--stats", input="Hi\nWho?\n")
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("cached: 0 tokens | prompt: 4 new tokens | first token after ")
    assert all("new: 4 tokens" in line and "tokens/s" in line for line in lines)


def test_system_message_and_commands_change_the_conversation(bundle):
    commands = "Hi\n/system Be brief\n/undo\nHi\n/system\n/reset\nHi\n/exit\nnever\n"
    result = chat(bundle, "--system", "S", input=commands)
    expected = [answers(bundle, "Hi", system=system)[0] for system in ("S", "Be brief", None)]
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split() == expected
    assert len(set(expected)) == 3
    assert len(result.stderr.splitlines()) == 4


def test_help_lists_every_command(bundle):
    result = chat(bundle, input="/help\n")
    assert result.exit_code == 0
    for name in ("help", "system", "undo", "reset", "save", "load", "exit"):
        assert f"/{name}" in result.stderr
    assert result.stdout == ""


def test_saved_conversation_goes_on_where_it_was(bundle, tmp_path):
    file = tmp_path / "été.json"
    first, second = answers(bundle, "Hi 🙂", "Who?")
    assert chat(bundle, input=f"Hi 🙂\n/save {file}\n").exit_code == 0
    assert "🙂" in file.read_text()
    assert json.loads(file.read_text()) == [
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": first},
    ]
    assert chat(bundle, input=f"/load {file}\nWho?\n").stdout == second + "\n"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_save_replaces_a_file_only_when_told_to(bundle, tmp_path):
    file = tmp_path / "it is"
    file.write_text("precious")
    result = chat(bundle, input=f"/save {file}\n")
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert file.read_text() == "precious"
    assert chat(bundle, input=f"/save --force {file}\n").exit_code == 0
    assert json.loads(file.read_text()) == []
    assert chat(bundle, input=f"/load {file}\nHi\n").stdout.split() == answers(bundle, "Hi")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ("{}", "list of messages"), ('[{"content": "x"}]', "list of messages")],
)
def test_load_refuses_what_is_no_conversation(bundle, tmp_path, content, words):
    file = tmp_path / "file.json"
    file.write_text(content)
    result = chat(bundle, input=f"/load {file}\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nothing", ["/nothing", "/help"]),
        ("/save", ["/save FILE"]),
        ("/undo twice", ["/undo"]),
        ("/load {tmp}/none", ["No such file"]),
        ("/save {tmp}", ["folder"]),
        ("/save {tmp}/no/file", ["{tmp}/no/file: No such file"]),
        ("/save ~nobody-here/file", ["~nobody-here/file: No such file"]),
        ("/load ~nobody-here/file", ["~nobody-here/file: No such file"]),
        ("/save --force", ["/save FILE"]),
        ("/save a\0b", ["cannot name a file"]),
        ("x" * 70, ["64", "--max-sequence-length"]),
    ],
)
def test_piped_input_ends_at_what_is_refused(bundle, tmp_path, line, words):
    result = chat(bundle, input=f"Hi\n{line.format(tmp=tmp_path)}\nnever\n")
    assert result.exit_code == 1
    assert result.stdout.split() == answers(bundle, "Hi")
    assert result.stderr.count("\n") == 1
    assert all(word.format(tmp=tmp_path) in result.stderr for word in words), result.stderr


def test_save_replaces_no_special_file(bundle, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = chat(bundle, input=f"/save --force {pipe}\n")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no regular file" in result.stderr
    assert pipe.is_fifo()


def test_save_takes_the_longest_name_that_there_is(bundle, tmp_path):
    assert chat(bundle, input=f"/save {tmp_path / ('x' * 255)}\n").exit_code == 0
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


def test_save_of_a_message_that_is_not_utf8_is_refused(bundle, tmp_path):
    result = chat(bundle, "--system", "a\udcff", input=f"/save {tmp_path / 'file'}\n")
    assert result.exit_code == 1
    assert "not valid UTF-8" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_input_that_is_not_utf8_names_the_line(bundle):
    result = chat(bundle, input=b"Hi\n\xff\n")
    assert result.exit_code == 1
    assert "Line 2" in result.stderr


def test_thinking_reaches_the_template(thinker):
    counts = {
        option: json.loads(chat(thinker, "Hi", "--json", "--stats", *option, input="").stdout)
        for option in ((), ("--thinking",), ("--no-thinking",))
    }
    tokens = [document["stats"]["prompt_tokens"] for document in counts.values()]
    assert tokens == [4, 5, 4]


def test_system_and_thinking_work_with_one_prompt(thinker):
    arguments = ["run", thinker, "Hi", "--chat-template", "--json", "--stats", *FOUR]
    options = (), ("--thinking",), ("--system", "S"), ("--thinking", "--system", "S")
    results = [CliRunner().invoke(main, [*arguments, *extra]).stdout for extra in options]
    tokens = [json.loads(result)["stats"]["prompt_tokens"] for result in results]
    assert tokens == [4, 5, 7, 8]


def test_thinking_without_a_switch_is_refused(bundle):
    result = chat(bundle, "--thinking", input="Hi\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "no switch for thinking" in result.stderr


def test_system_message_that_the_template_refuses_is_its_error(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    folder = str(write_bundle(tmp_path / "bundle", chat_template=template))
    result = chat(folder, "--system", "S", input="Hi\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "No system!" in result.stderr


def test_bundle_without_template_is_refused_before_anything_is_read(tmp_path):
    folder = str(write_bundle(tmp_path / "base", chat_template=None))
    result = chat(folder, input="Hi\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "no chat template" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--chat", "--prompts", "x"), ("Hi", "--system", "S"), ("Hi", "--thinking"), ()],
    ids=str,
)
def test_options_that_do_not_go_together_are_wrong_usage(bundle, arguments):
    result = CliRunner().invoke(main, ["run", bundle, *arguments])
    assert (result.exit_code, result.stdout) == (2, "")


# Steps as slow as a large model's, so that a test can press a key between two.
_SLOW = """
import time
from kvconv.cli import main
from kvconv.runtime import row
step = row.Row.step
def slow_step(row, logits):
    time.sleep(0.1)
    return step(row, logits)
row.Row.step = slow_step
main()
"""
_FAST = "from kvconv.cli import main; main()"


class Terminal:
    """A program in a terminal of its own: what is typed reaches it as keys, Ctrl-C as a signal."""

    def __init__(self, code: str, *arguments: str, **streams) -> None:
        self._master, slave = pty.openpty()
        self.screen = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *arguments],
            **({"stdin": slave, "stdout": slave, "stderr": slave} | streams),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
            env=os.environ | {"TERM": "dumb", "INPUTRC": os.devnull},
        )
        os.close(slave)

    def expect(self, text: str, seconds: float = 60) -> str:
        """Wait until a text is on the screen; returns what came up to and with it."""
        deadline = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen!r}"
            assert self._read(), f"ended before {text!r} came: {self.screen!r}"
        seen, found, self.screen = self.screen.partition(text)
        return seen + found

    def expect_letters(self, number: int) -> None:
        """Wait until so many letters of an answer are on the screen, and leave them there."""
        deadline = time.monotonic() + 60
        while len(self.screen) < number:
            assert time.monotonic() < deadline, self.screen
            assert self._read(), self.screen
        assert self.screen[:number].isalpha()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the program waits for keys; a moment before it would not be woken."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        deadline = time.monotonic() + 60
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it never waits for keys"
            time.sleep(0.01)
        time.sleep(0.05)
        self.type("\x03")

    def wait(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"it goes on: {self.screen!r}"
        return self._process.wait(60)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 1)[0]:
            return self._process.poll() is None
        with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
            data = os.read(self._master, 4096)
            self.screen += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture
def terminal():
    with contextlib.ExitStack() as stack:

        def start(*arguments, **streams) -> Terminal:
            return stack.enter_context(contextlib.closing(Terminal(*arguments, **streams)))

        yield start


def test_typed_turns_are_answered_and_the_last_line_comes_back(bundle, terminal):
    pytest.importorskip("readline")
    screen = terminal(_FAST, bundle, "--chat", *FOUR)
    screen.expect("/help lists the commands.")
    screen.expect("> ")
    first, second = answers(bundle, "Hi", "Hi")
    screen.type("Hi\r")
    screen.expect(f"Hi\n{first}\n> ")
    screen.type("\x1b[A\r")  # the arrow up
    screen.expect(f"Hi\n{second}\n> ")
    screen.type("x" * 70 + "\r")
    screen.expect("Error: ")
    screen.expect("> ")
    screen.type("/load nothing\r")
    screen.expect("Error: nothing: No such file")
    screen.expect("> ")
    screen.type("/undo\r")
    screen.expect("taken back.\n> ")
    screen.type("a\\\r")
    screen.expect(". ")
    screen.type("b\r")
    assert answers(bundle, "Hi", "a\nb")[1] in screen.expect("> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(bundle, terminal, tmp_path):
    screen = terminal(_SLOW, bundle, "--chat", "--max-new-tokens", "15")
    screen.expect("> ")
    screen.type("Hi\r")
    screen.expect("Hi\n")
    screen.expect_letters(3)
    screen.type("\x03")
    shown = screen.expect("Stopped; what was shown stays.\n> ")
    screen.type(f"/save {tmp_path / 'file'}\r")
    screen.expect("2 messages are in")
    screen.expect("> ")
    content = json.loads((tmp_path / "file").read_text())[1]["content"]
    assert 3 <= len(content) < 15
    assert shown.startswith(content)
    screen.type("Who?\r")
    screen.expect("Who?\n")
    screen.expect("> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_ctrl_c_at_the_prompt_leaves_the_second_time(bundle, terminal):
    screen = terminal(_FAST, bundle, "--chat", *FOUR)
    screen.expect("> ")
    screen.interrupt()
    screen.expect("Ctrl-C again or Ctrl-D leaves the chat")
    screen.expect("> ")
    screen.type("Hi\r")  # a turn in between: the next one counts as the first again
    screen.expect("Hi\n")
    screen.expect("> ")
    screen.interrupt()
    screen.expect("Ctrl-C again or Ctrl-D leaves the chat")
    screen.expect("> ")
    screen.interrupt()
    assert screen.wait() == 0


def test_ctrl_c_after_half_a_line_drops_it(bundle, terminal):
    pytest.importorskip("readline")
    screen = terminal(_FAST, bundle, "--chat", *FOUR)
    screen.expect("> ")
    for _ in range(3):
        screen.type("half a line")
        screen.expect("half a line")
        screen.interrupt()
        assert "again" not in screen.expect("> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_python_without_readline_takes_lines_all_the_same(bundle, terminal):
    code = "import sys; sys.modules['readline'] = None; " + _FAST
    screen = terminal(code, bundle, "x" * 70, "--chat", *FOUR)
    screen.expect("Error: ")  # the first turn does not fit
    screen.expect("> ")
    screen.type("Hi\n")
    screen.expect(answers(bundle, "Hi")[0])
    screen.expect("> ")
    screen.interrupt()
    screen.expect("Ctrl-C again")
    screen.expect("> ")
    screen.interrupt()
    assert screen.wait() == 0


def test_answers_go_to_a_file_and_the_prompt_does_not(bundle, terminal, tmp_path):
    with (tmp_path / "answers").open("wb") as file:
        screen = terminal(_FAST, bundle, "--chat", *FOUR, stdout=file)
        screen.expect("> ")
        screen.type("Hi\n")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.wait() == 0
    assert (tmp_path / "answers").read_text() == answers(bundle, "Hi")[0] + "\n"


def test_ctrl_c_ends_a_piped_chat_with_130(bundle, terminal):
    screen = terminal(_SLOW, bundle, "Hi", "--chat", stdin=subprocess.DEVNULL)
    screen.expect_letters(3)
    screen.type("\x03")
    assert screen.wait() == 130
