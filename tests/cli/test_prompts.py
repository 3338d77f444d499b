"""Files of prompts: what is read, and how each kind of damage is named."""

import io
import json
from types import SimpleNamespace

import pytest

from kvconv.cli.prompts import read_prompts
from kvconv.errors import PromptError
from kvconv.runtime import SamplingParams

PARAMS = SamplingParams(max_new_tokens=7, temperature=0.5)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def read(tmp_path):
    def read_bytes(content: bytes, params: SamplingParams = PARAMS):
        path = tmp_path / "prompts"
        path.write_bytes(content)
        return read_prompts(str(path), params)

    return read_bytes


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\n  two \r\n", ["one", "  two "]),
        (b"\xef\xbb\xbfone", ["one"]),
        (b"\n \n\t\none\n\n", ["one"]),
        ("été\u2028 \x85 x\n海".encode(), ["été\u2028 \x85 x", "海"]),
        (b'"quoted"\n{"prompt": "b"}', ['"quoted"', '{"prompt": "b"}']),
        (b"x" * 3_000_000, ["x" * 3_000_000]),
        (b'{"prompt": "one"}\n{"prompt": "a\\nb"}', ["one", "a\nb"]),
        (b'\xef\xbb\xbf\r\n  {"prompt": "one"}\r\n\r\n', ["one"]),
        (b'{"prompt": "%s"}' % (b"x" * 3_000_000), ["x" * 3_000_000]),
    ],
    ids=["plain", "CRLF", "BOM", "blank", "separators", "quotes", "huge", "JSON", "JSON BOM CRLF",
         "JSON huge"],
)  # fmt: skip
def test_prompts_are_read_in_order(read, content, prompts):
    found = read(content)
    assert [prompt.labels for prompt in found] == [
        {"index": i, "prompt": text} for i, text in enumerate(prompts)
    ]
    assert all(prompt.params == PARAMS for prompt in found)


def test_lines_override_params_and_pass_their_id_through(read):
    overrides = {
        "max_new_tokens": 3, "temperature": 1, "top_k": 4, "top_p": 0.5, "min_p": 0.1,
        "repetition_penalty": 1.5, "seed": 9, "stop": ["a", "b"],
    }  # fmt: skip
    lines = [
        {"prompt": "a", "id": {"any": [1, None]}, **overrides},
        {"messages": MESSAGES, "id": None, "stop": "x"},
        {"prompt": "c", "seed": None},
    ]
    first, second, third = read("\n".join(map(json.dumps, lines)).encode())
    assert first.labels == {"index": 0, "id": {"any": [1, None]}, "prompt": "a"}
    assert first.params == SamplingParams(**{**overrides, "stop": ("a", "b")})
    assert second.labels == {"index": 1, "id": None, "messages": MESSAGES}
    assert second.params == SamplingParams(max_new_tokens=7, temperature=0.5, stop=("x",))
    assert third.params == PARAMS


def test_one_seed_gives_each_prompt_its_own_and_a_line_may_say_otherwise(read):
    content = b'{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c", "seed": 1}\n{"prompt": "d"}'
    found = read(content, SamplingParams(seed=100))
    assert [prompt.params.seed for prompt in found] == [100, 101, 1, 103]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["holds no prompt"]),
        (b"\xef\xbb\xbf\n  \r\n", ["holds no prompt"]),
        (b"one\n\ntw\xff\n", ["line 3", "UTF-8"]),
        ("one".encode("utf-16"), ["line 1", "UTF-8"]),
        (b'{"prompt": "a"}\nplain', ["line 2", "plain", '{"prompt": "..."}']),
        (b'{"prompt": "a"}\n[1]', ["line 2", "[1]", "object"]),
        (b'{"prompt": "a", "id": NaN}', ["line 1", "NaN"]),
        (b'{"prompt": "\\ud800"}', ["line 1", "surrogates"]),
        (b'{"a":' * 100_000, ["line 1"]),
        (b'{"text": "a"}', ["line 1", "unknown key text", "messages, min_p, prompt"]),
        (b'{"id": 1}', ["line 1", "either a prompt or messages"]),
        (b'{"prompt": "a", "messages": []}', ["line 1", "either"]),
        (b'{"prompt": 5}', ["line 1", "string", "5"]),
        (b'{"prompt": null}', ["line 1", "string", "null"]),
        (b'{"messages": []}', ["line 1", "role", "[]"]),
        (b'{"messages": ["hi"]}', ["line 1", "role", '["hi"]']),
        (b'{"messages": [{"content": "hi"}]}', ["line 1", "role"]),
        (b'{"prompt": "a", "temperature": -1}', ["line 1", "temperature is -1", "[0.001"]),
        (b'{"prompt": "a", "max_new_tokens": 0}', ["line 1", "max_new_tokens is 0"]),
        (b'{"prompt": "a", "max_new_tokens": 1.5}', ["max_new_tokens must be int, found 1.5"]),
        (b'{"prompt": "a", "top_k": true}', ["top_k must be int, found True"]),
        (b'{"prompt": "a", "top_p": "0.5"}', ["top_p must be float, found '0.5'"]),
        (b'{"prompt": "a", "top_p": 1%s}' % (b"0" * 400), ["line 1", "too large"]),
        (b'{"prompt": "a", "stop": ""}', ["line 1", "stop"]),
        (b'{"prompt": "a", "stop": [1]}', ["stop[0] must be str, found 1"]),
        (b'{"prompt": "a"}\n' + b"x" * 5000, ["line 2", "xxx..."]),
    ],
    ids=lambda value: "" if isinstance(value, list) else repr(value[:40]),
)  # fmt: skip
def test_damage_is_named_with_file_and_line(read, content, words):
    with pytest.raises(PromptError) as caught:
        read(content)
    message = str(caught.value)
    assert "/prompts" in message
    assert all(word in message for word in words), message
    assert len(message) < 500


def test_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntw\xff")))
    with pytest.raises(PromptError, match="Standard input, line 2 is not UTF-8"):
        read_prompts("-", PARAMS)
