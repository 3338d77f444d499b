"""`kvconv run` on a tiny bundle, in process; signals and pipes in a process of their own."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvconv.cli import main
from kvconv.manifest import read_manifest
from kvconv.plan import kv_cache_bytes
from kvconv.runtime import Generator, SamplingParams, Session
from tiny_bundle import MAX_SEQUENCE_LENGTH, letter_decoder, write_bundle

PROMPT = "Hello"
NINE = ("--max-new-tokens", "9")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    return str(write_bundle(folder, decoder=letter_decoder()))


@pytest.fixture(scope="module")
def answer(bundle) -> str:
    generator = Generator.open(bundle, threads=1)
    text = "".join(generator.stream(PROMPT, SamplingParams(max_new_tokens=9)))
    assert len(text) == 9
    assert text.isalpha()
    return text


def run(*arguments, **options):
    return CliRunner().invoke(main, ["run", *arguments], **options)


def test_text_goes_to_stdout_and_nothing_else_anywhere(bundle, answer):
    result = run(bundle, PROMPT, *NINE)
    assert (result.exit_code, result.stdout, result.stderr) == (0, answer + "\n", "")


def test_text_is_streamed_piece_by_piece(bundle, answer, monkeypatch):
    written = []
    monkeypatch.setattr("click.echo", lambda text="", **_: written.append(text))
    run(bundle, PROMPT, *NINE)
    assert written == [*answer, ""]


def test_prefill_chunk_reaches_the_session_and_changes_no_text(bundle, answer, monkeypatch):
    lengths = []
    whole = Session.run

    def noted(self, cache, input_ids, **options):
        lengths.append(input_ids.shape[1])
        return whole(self, cache, input_ids, **options)

    monkeypatch.setattr(Session, "run", noted)
    result = run(bundle, PROMPT, *NINE, "--prefill-chunk", "4")
    assert (result.exit_code, result.stdout) == (0, answer + "\n")
    assert lengths == [4, 2]  # BOS and five letters


@pytest.mark.parametrize(("flags", "spins"), [([], True), (["--no-spin"], False)], ids=str)
def test_no_spin_reaches_the_session_and_changes_no_text(bundle, answer, flags, spins, monkeypatch):
    given = []
    make = Session.__init__

    def noted(self, bundle, **options):
        given.append(options["spin"])
        make(self, bundle, **options)

    monkeypatch.setattr(Session, "__init__", noted)
    result = run(bundle, PROMPT, *NINE, *flags)
    assert (result.exit_code, result.stdout) == (0, answer + "\n")
    assert given == [spins]


@pytest.mark.parametrize("given", [PROMPT, PROMPT + "\n"])
def test_dash_reads_stdin_less_one_newline(bundle, answer, given):
    assert run(bundle, "-", *NINE, input=given).stdout == answer + "\n"


def test_dash_keeps_other_newlines(bundle, answer):
    result = run(bundle, "-", *NINE, "--json", input=PROMPT + "\n\n")
    assert json.loads(result.stdout)["prompt"] == PROMPT + "\n"


def test_json_is_one_line_with_exactly_the_documented_fields(bundle, answer):
    result = run(bundle, PROMPT, *NINE, "--json")
    assert result.stdout.count("\n") == 1
    document = json.loads(result.stdout)
    assert document == {
        "prompt": PROMPT,
        "text": answer,
        "token_ids": document["token_ids"],
        "finish_reason": "length",
    }
    tokenizer = Generator.open(bundle, threads=1).tokenizer
    assert tokenizer.detokenize(document["token_ids"]) == answer


def test_json_with_stats_has_the_figures(bundle):
    stats = json.loads(run(bundle, PROMPT, *NINE, "--json", "--stats").stdout)["stats"]
    assert set(stats) == {
        "prompt_tokens",
        "new_tokens",
        "seconds",
        "tokens_per_s",
        "kv_cache_bytes",
        "peak_rss_mb",
    }
    assert stats["prompt_tokens"] == 1 + len(PROMPT)
    assert stats["new_tokens"] == 9
    assert stats["tokens_per_s"] == pytest.approx(9 / stats["seconds"])
    layers = Generator.open(bundle, threads=1).session.manifest.cache_layers
    held = kv_cache_bytes(layers, batch_size=1, max_sequence_length=6 + 9 - 1)
    assert stats["kv_cache_bytes"] == held
    assert stats["peak_rss_mb"] > 10


def test_stats_go_to_stderr(bundle, answer):
    result = run(bundle, PROMPT, *NINE, "--stats")
    assert result.stdout == answer + "\n"
    for part in ("prompt: 6 tokens", "new: 9 tokens", "tokens/s", "kv_cache_bytes: ", "peak RSS"):
        assert part in result.stderr


def test_chat_template_wraps_the_prompt(bundle):
    plain = json.loads(run(bundle, PROMPT, *NINE, "--json", "--stats").stdout)
    chat = json.loads(run(bundle, PROMPT, *NINE, "--json", "--stats", "--chat-template").stdout)
    assert chat["prompt"] == PROMPT
    wrapped = len("[user] Hello\n[assistant] ") + 1
    assert chat["stats"]["prompt_tokens"] == wrapped != plain["stats"]["prompt_tokens"]


def test_raw_prompt_that_ends_at_once_is_told_of_the_chat_template(bundle, tmp_path):
    first = json.loads(run(bundle, PROMPT, *NINE, "--json").stdout)["token_ids"][0]
    folder = str(shutil.copytree(bundle, tmp_path / "ends"))
    dataclasses.replace(read_manifest(Path(folder)), eos_token_ids=(first,)).write(Path(folder))
    result = run(folder, PROMPT, *NINE)
    assert result.stdout == "\n"
    assert "With --chat-template" in result.stderr
    assert "With --chat-template" not in run(folder, PROMPT, *NINE, "--chat-template").stderr


def test_stop_cuts_the_text(bundle, answer):
    result = run(bundle, PROMPT, *NINE, "--json", "--stop", "%%", "--stop", answer[3:5])
    document = json.loads(result.stdout)
    assert document["text"] == answer.partition(answer[3:5])[0]
    assert document["finish_reason"] == "stop"


def test_sampling_options_reach_the_sampler(bundle, answer):
    options = ["--temperature", "5", "--top-p", "0.99", "--min-p", "0.0001", "--top-k", "20"]
    options += ["--repetition-penalty", "1.1", *NINE]
    first, again, other = (run(bundle, PROMPT, *options, "--seed", s).stdout for s in "778")
    assert first == again
    assert len({first, other, answer + "\n"}) == 3
    assert run(bundle, PROMPT, *options, "--seed", "1", "--top-k", "1").stdout != first


def test_generation_ends_at_the_given_capacity(bundle):
    result = run(bundle, PROMPT, "--json", "--max-sequence-length", "10")
    document = json.loads(result.stdout)
    assert (len(document["token_ids"]), document["finish_reason"]) == (4, "length")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ([PROMPT, "--max-sequence-length", "3"], {}, ["6 tokens", "--max-sequence-length"]),
        (["x" * MAX_SEQUENCE_LENGTH], {}, ["65 tokens", "--max-sequence-length"]),
        ([PROMPT, "--max-sequence-length", "65"], {}, ["65", "64"]),
        (["-"], {"input": b"\xff\xfe"}, ["UTF-8"]),
        ([PROMPT, "--provider", "cuda"], {}, ["cuda", "cpu"]),
    ],
)
def test_what_a_person_can_mend_is_one_line(bundle, arguments, options, words):
    result = run(bundle, *arguments, **options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_missing_bundle_is_one_line(tmp_path):
    result = run(str(tmp_path / "nothing"), PROMPT)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "kvconv export" in result.stderr


def test_empty_prompt_is_refused_when_nothing_is_added_to_it(bundle, monkeypatch):
    monkeypatch.setattr("kvconv.runtime.tokenizer.Tokenizer.encode", lambda *_, **__: [])
    result = run(bundle, "")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "prompt is empty" in result.stderr


def test_bundle_without_chat_template_is_one_line(tmp_path):
    folder = write_bundle(tmp_path / "base", chat_template=None)
    result = run(str(folder), PROMPT, "--chat-template")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "without --chat-template" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-1"),
        ("--top-p", "1.5"),
        ("--max-new-tokens", "0"),
        ("--repetition-penalty", "0"),
        ("--stop", ""),
        ("--threads", "0"),
        ("--provider", "tpu"),
    ],
)
def test_wrong_usage_exits_with_2(bundle, option, value):
    result = run(bundle, PROMPT, option, value)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_help_keeps_the_examples_on_lines_of_their_own():
    lines = [line.strip() for line in run("--help").stdout.splitlines()]
    assert 'kvconv run smollm2 "What is the capital of France?" --chat-template' in lines
    assert "\\b" not in lines


def test_debug_shows_the_cause(tmp_path):
    result = run(str(tmp_path / "nothing"), PROMPT, "--debug")
    assert type(result.exception).__name__ == "ModelNotFoundError"


_INTERRUPT_THIRD_TOKEN = """
import os, signal
from kvconv.cli import main
from kvconv.runtime import row
step, calls = row.Row.step, []
def interrupted_step(row, logits):
    calls.append(row)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return step(row, logits)
row.Row.step = interrupted_step
main()
"""


def test_ctrl_c_ends_cleanly(bundle, answer):
    command = [sys.executable, "-c", _INTERRUPT_THIRD_TOKEN, "run", bundle, PROMPT, *NINE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 130
    assert result.stdout == answer[:2]
    assert result.stderr == "\n"


@pytest.mark.parametrize("options", [(), ("--json",), ("--stats",)])
def test_closed_pipe_ends_quietly(bundle, options):
    command = [sys.executable, "-c", "from kvconv.cli import main; main()", "run", bundle, PROMPT]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def test_results_need_an_open_stdout_and_no_open_stderr(bundle, answer):
    command = [sys.executable, "-c", "from kvconv.cli import main; main()"]
    command += ["run", bundle, PROMPT, "--stats", *NINE]

    def run_with(redirection):
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
            capture_output=True,
            text=True,
            check=False,
        )

    without_stderr, without_stdout = run_with("2>&-"), run_with(">&-")
    assert (without_stderr.returncode, without_stderr.stdout) == (0, f"{answer}\n")
    assert without_stdout.returncode == 1
    assert "Standard output is closed" in without_stdout.stderr


def test_run_needs_no_converter(bundle):
    script = (
        "import sys\n"
        "from kvconv.cli import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(sorted({'torch', 'transformers', 'onnx'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", script, "run", bundle, PROMPT, *NINE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
    assert result.returncode == 0
