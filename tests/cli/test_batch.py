"""`kvconv run --prompts` on tiny bundles: each line's result is that of a single run."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvconv.cli import main
from kvconv.errors import KvconvError
from kvconv.manifest import read_manifest
from kvconv.runtime import Generator, Session
from tiny_bundle import MAX_SEQUENCE_LENGTH, VOCAB_SIZE, letter_decoder, write_bundle

MAIN = [sys.executable, "-c", "from kvconv.cli import main; main()", "run"]
FOX = "The quick brown fox jumps over the lazy dog"
LINES = (
    {"prompt": "Hello", "id": "first"},
    {"prompt": FOX, "max_new_tokens": 60},  # more than fits behind it
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 2.0, "seed": 4},
    {"prompt": "a", "max_new_tokens": 60},  # a batch with the fox would cut its answer
    {"prompt": "été 海", "temperature": 3.0, "top_k": 50, "seed": 4, "repetition_penalty": 1.2},
    {"prompt": "été 海", "temperature": 3.0, "top_p": 0.9, "seed": 5, "stop": ["e", "a"]},
    {"prompt": "Hello", "max_new_tokens": 1},
    {"prompt": "12345678", "temperature": 1.0, "min_p": 0.01, "seed": 0},
    {"prompt": "x", "repetition_penalty": 2.0, "stop": "e"},
    {"prompt": "Hello", "temperature": 2.0, "seed": 22},
)


@pytest.fixture(scope="module", params=["flash", "standard"])
def bundle(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("batch") / request.param
    return str(write_bundle(folder, decoder=letter_decoder(ends=True), attention=request.param))


only_flash = pytest.mark.parametrize("bundle", ["flash"], indirect=True)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return str(path)


def run(*arguments, **options):
    return CliRunner().invoke(main, ["run", *arguments, "--threads", "1"], **options)


def documents(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def alone(bundle, line, *options):
    """Run one line without a file."""
    arguments = ["--json", "--max-new-tokens", str(line.get("max_new_tokens", 12)), *options]
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
        if name in line:
            arguments += [f"--{name.replace('_', '-')}", str(line[name])]
    for stop in line.get("stop", ()):
        arguments += ["--stop", stop]
    prompt = line.get("prompt")
    if prompt is None:
        prompt = line["messages"][0]["content"]
        arguments.append("--chat-template")
    [document] = documents(run(bundle, prompt, *arguments))
    return document


@pytest.fixture(scope="module")
def wanted(bundle):
    results = []
    for index, line in enumerate(LINES):
        document = alone(bundle, line)
        labels = {key: line[key] for key in ("id", "prompt", "messages") if key in line}
        results.append({"index": index, **document, **labels})
        if "messages" in line:
            del results[-1]["prompt"]
    assert {result["finish_reason"] for result in results} == {"length", "eos", "stop"}
    assert len({len(result["token_ids"]) for result in results}) > 4
    return results


@pytest.mark.parametrize("batch_size", [1, 3, 8, 50])
def test_results_equal_single_runs_at_every_batch_size(bundle, file, wanted, batch_size):
    result = run(
        bundle, "--prompts", file, "--max-new-tokens", "12", "--batch-size", str(batch_size)
    )
    assert documents(result) == wanted
    assert result.stderr == ""


@pytest.mark.parametrize("batch_size", ["1", "4"])
def test_one_seed_runs_each_line_like_a_single_run_with_its_index_added(bundle, batch_size):
    options = ["--max-new-tokens", "12", "--temperature", "3"]
    text = "Hello\n\nHello\nsome longer words\nHello"
    found = documents(
        run(bundle, "--prompts", "-", *options, "--seed", "6", "--batch-size", batch_size,
            input=text)
    )  # fmt: skip
    single = [
        alone(bundle, {"prompt": line, "seed": 6 + i}, "--temperature", "3")
        for i, line in enumerate(text.replace("\n\n", "\n").split("\n"))
    ]
    assert [result["token_ids"] for result in found] == [r["token_ids"] for r in single]
    assert found[0]["token_ids"] != found[1]["token_ids"]


def test_chat_template_wraps_plain_prompts(bundle):
    [found] = documents(run(bundle, "--prompts", "-", "--chat-template", input="Hi"))
    wanted = alone(bundle, {"prompt": "Hi", "max_new_tokens": 256}, "--chat-template")
    assert found == {"index": 0, **wanted}


def test_result_is_printed_as_soon_as_its_turn_comes(bundle, monkeypatch):
    seen, steps = [], []
    step = Session._execute

    def count(*arguments):
        steps.append(1)
        return step(*arguments)

    monkeypatch.setattr(Session, "_execute", count)
    monkeypatch.setattr(
        "kvconv.cli.batch.print_json", lambda value: seen.append((value["index"], len(steps)))
    )
    lines = [{"prompt": "a", "max_new_tokens": n} for n in (2, 4, 1, 3)]
    result = run(bundle, "--prompts", "-", input="\n".join(map(json.dumps, lines)))
    assert result.exit_code == 0
    assert seen == [(0, 2), (1, 4), (2, 4), (3, 4)]


def test_stats_are_totals_on_stderr(bundle):
    result = run(
        bundle, "--prompts", "-", "--stats", "--max-new-tokens", "3", "--batch-size", "2",
        input="a\nbb\nccc",
    )  # fmt: skip
    new = sum(len(document["token_ids"]) for document in documents(result))
    assert f"prompts: 3 in 2 batches, {2 + 3 + 4} tokens | new: {new} tokens, " in result.stderr
    assert "kv_cache_bytes: " in result.stderr


@only_flash
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a\nb\n\n{'x' * MAX_SEQUENCE_LENGTH}\nc", ["line 4", "65 tokens", "64", "shorten"]),
        (b"a\nb\n\xff", ["line 3", "UTF-8"]),
        ('{"prompt": "a"}\n{"prompt": "b", "seed": -1}', ["line 2", "seed is -1"]),
        ("", ["Standard input holds no prompt"]),
    ],
    ids=["does not fit", "UTF-8", "value", "empty"],
)
def test_wrong_line_is_refused_before_anything_is_printed(bundle, text, words):
    result = run(bundle, "--prompts", "-", input=text)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_messages_without_a_template_name_their_line(tmp_path):
    folder = write_bundle(tmp_path / "base", chat_template=None)
    text = '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}'
    result = run(str(folder), "--prompts", "-", input=text)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "line 2: The bundle" in result.stderr
    assert "no chat template" in result.stderr


@only_flash
def test_missing_file_is_one_line(bundle, tmp_path):
    result = run(bundle, "--prompts", str(tmp_path / "absent"))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "absent: No such file" in result.stderr


def test_batch_that_the_machine_cannot_hold_is_refused_before_anything_runs(bundle, monkeypatch):
    layer_bytes, logits_bytes = 2 * 8 * 4, VOCAB_SIZE * 4
    growth = 1 if read_manifest(Path(bundle)).attention == "flash" else 2
    free = 5 * (12 * layer_bytes * growth + logits_bytes)
    monkeypatch.setattr("kvconv.plan.check_weights_fit", lambda sizes, free_bytes: None)
    monkeypatch.setattr("kvconv.memory.free_memory_bytes", lambda: free)
    options = ["--prompts", "-", "--max-new-tokens", "10"]
    result = run(bundle, *options, input="\n".join("abcdefghij"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "KV cache of 8 x 12 tokens" in result.stderr
    assert "--batch-size" in result.stderr
    assert run(bundle, *options, "--batch-size", "5", input="a\nb\nc\nd\ne\nf").exit_code == 0


def test_batch_that_the_generator_refuses_is_refused_before_anything_is_printed(
    bundle, monkeypatch
):
    def check(generator, prompts, params):
        if len({len(prompt) for prompt in prompts}) > 1:
            raise KvconvError("no padding, please")

    monkeypatch.setattr(Generator, "check", check)
    options = ["--prompts", "-", "--max-new-tokens", "2", "--batch-size", "2"]
    result = run(bundle, *options, input="a\nb\ncc\nddd")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no padding, please" in result.stderr


@only_flash
@pytest.mark.parametrize(
    "arguments",
    [[], ["Hello", "--prompts", "x"], ["Hello", "--batch-size", "2"],
     ["--prompts", "x", "--batch-size", "0"]],
    ids=str,
)  # fmt: skip
def test_wrong_usage_exits_with_2(bundle, arguments):
    assert run(bundle, *arguments).exit_code == 2


_INTERRUPT_LATER = """
import os, signal
from kvconv.cli import main
from kvconv.runtime import row
step, calls = row.Row.step, []
def interrupted_step(row, logits):
    calls.append(row)
    if len(calls) == 25:
        os.kill(os.getpid(), signal.SIGINT)
    return step(row, logits)
row.Row.step = interrupted_step
main()
"""


@only_flash
def test_ctrl_c_leaves_whole_lines(bundle, file, wanted):
    options = ["run", bundle, "--prompts", file, "--max-new-tokens", "12", "--batch-size", "1"]
    command = [sys.executable, "-c", _INTERRUPT_LATER, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "\n")
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.stdout.endswith("\n")
    assert printed == wanted[: len(printed)]
    assert 0 < len(printed) < len(wanted)


@only_flash
def test_ctrl_c_while_the_reader_is_slow_leaves_whole_lines(bundle, tmp_path):
    line = {"prompt": "a", "id": "x" * 300_000, "max_new_tokens": 1}  # more than a pipe holds
    file = tmp_path / "long"
    file.write_text("\n".join([json.dumps(line)] * 3))
    process = subprocess.Popen(
        [*MAIN, bundle, "--prompts", str(file), "--batch-size", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    begin = process.stdout.read(1)  # the first line is being written
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    rest, error = process.communicate()
    assert (process.returncode, error) == (130, b"\n")
    assert json.loads(begin + rest)["index"] == 0


@only_flash
def test_stdout_that_is_not_utf8_gets_escapes_and_loses_nothing(bundle):
    result = subprocess.run(
        [*MAIN, bundle, "--prompts", "-", "--max-new-tokens", "1"],
        input="été 海".encode(), capture_output=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert json.loads(result.stdout.decode("ascii"))["prompt"] == "été 海"


@only_flash
def test_closed_pipe_ends_quietly(bundle, file):
    process = subprocess.Popen(
        [*MAIN, bundle, "--prompts", file],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


@only_flash
def test_terminal_sees_progress_while_the_results_go_elsewhere(bundle, file, wanted):
    ours, theirs = pty.openpty()
    command = [*MAIN, bundle, "--prompts", file, "--max-new-tokens", "12"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    output = process.stdout.read()
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
    os.close(ours)
    assert process.wait() == 0
    assert [json.loads(line) for line in output.splitlines()] == wanted
    assert b"10/10" in shown
    assert b"finish_reason" not in shown
