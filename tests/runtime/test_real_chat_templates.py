"""The chat templates of some dozens of real model families against transformers, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvconv.errors import PromptError
from kvconv.runtime.chat_template import ChatTemplate
from tiny_bundle import byte_tokenizer

pytestmark = pytest.mark.real
FILE = Path(__file__).parents[2] / "models/chat-templates.json"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
FAMILIES = {  # at least one template of each must have rendered
    *("alpaca", "aya", "chatml", "cohere", "cohere2", "command_a", "deepseek_r1_distill"),
    *("deepseek_v2", "deepseekv3", "exaone", "exaone4", "falcon_h1", "gemma", "gemma3", "gemma4"),
    *("glm4moe", "gptoss", "jamba", "lfm2", "llama", "llama3", "llama3_1", "llama3_2", "llama4"),
    *("mistral_v1", "mistral_v3_tekken", "mistral_v7_tekken", "nemotron_h", "phi3", "phi3_5"),
    *("phi_4", "pixtral", "qwen2_5", "qwen3", "vicuna", "zephyr"),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a "place" <now> & later: météo.',
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}


def turn(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def blocks(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of blocks, as templates of vision models take it."""
    return message | {"content": [{"type": "text", "text": message["content"]}]}


LONG = [
    turn("user", "  Hi <b>there</b> & you\n"),
    turn("assistant", "<think>\nThey greet.\n</think>\n\nHello! "),
    turn("user", "今日は 🙂 e\u0301 \\n {{ not jinja }}"),
    turn("assistant", "はい。", reasoning="A short answer.", name=None),
    turn("user", ""),
]
SYSTEM = [turn("system", "Be brief.\n"), *LONG[:3]]
CALL = {"name": "weather", "arguments": {"place": "Zürich"}}
CALLS = [{"id": "abcdefghi", "type": "function", "function": CALL}]
TOOL_TURNS = [
    turn("user", "Weather in Zürich?"),
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    turn("tool", '{"degrees": 3}', tool_call_id="abcdefghi", name="weather"),
]
CASES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": LONG[:1]},
    "several turns": {"messages": LONG},
    "without generation prompt": {"messages": LONG[:4], "add_generation_prompt": False},
    "system": {"messages": SYSTEM},
    "blocks": {"messages": [blocks(message) for message in SYSTEM]},
    "thinking": {"messages": SYSTEM, "variables": {"enable_thinking": True}},
    "no thinking": {"messages": SYSTEM, "variables": {"enable_thinking": False}},
    "tools": {"messages": LONG[:1], "tools": [WEATHER]},
    "tool call": {"messages": TOOL_TURNS, "tools": [WEATHER]},
    "wrong roles": {"messages": [LONG[1], LONG[0], LONG[0]]},
}


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    if not FILE.is_file():
        pytest.skip("chat-templates.json is not in models/; `make test-real` fetches it")
    found = json.loads(FILE.read_text())
    assert "{% generation %}" in found["trl/qwen3_training"]
    # Variants for training differ by generation tags only: one of them will do.
    return {
        name: source
        for name, source in found.items()
        if not name.endswith("_training") or name == "trl/qwen3_training"
    }


@pytest.fixture(scope="module")
def compiled(templates) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(source, SPECIAL) for name, source in templates.items()}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)


def rendered(render, *arguments, **options) -> tuple[str | None, str]:
    """Return the text, or None and what the template says against the conversation."""
    try:
        return render(*arguments, **options), ""
    except Exception as error:
        return None, str(error)


@pytest.mark.parametrize("case", CASES)
def test_every_template_renders_as_transformers_does(templates, compiled, tokenizer, case):
    messages, tools = CASES[case]["messages"], CASES[case].get("tools")
    variables = CASES[case].get("variables", {})
    prompt = CASES[case].get("add_generation_prompt", True)
    texts = {}
    for name, source in templates.items():
        expected, refusal = rendered(
            tokenizer.apply_chat_template,
            messages,
            chat_template=source,
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompt,
            **variables,
        )
        ours = compiled[name]
        options = {"add_generation_prompt": prompt, "tools": tools, "variables": variables}
        found, answer = rendered(ours.render, messages, **options)
        assert found == expected, name
        if expected is None:
            assert refusal in answer, name
            with pytest.raises(PromptError):
                ours.render(messages, **options)
        else:
            texts[name.partition("/")[2]] = found
    # Most templates refuse some of these on purpose; a family that refuses all proves nothing.
    if case in ("one turn", "several turns"):
        assert set(texts) >= FAMILIES
    assert len(texts) > 20


def test_thinking_changes_what_templates_with_the_switch_render(templates, compiled):
    switched = {}
    for name, template in compiled.items():
        if "enable_thinking" not in templates[name]:
            continue
        on, off = template.thinking(True), template.thinking(False)
        conversation = SYSTEM if "command" in name else LONG[:1]
        texts = [template.render(conversation, variables=variables) for variables in (on, off)]
        switched[name] = texts[0] != texts[1]
    assert {"trl/qwen3", "trl/glm4moe", "axolotl/exaone4"} <= set(switched)
    assert all(switched.values()), switched


def test_thinking_is_refused_where_the_template_has_no_switch(compiled):
    for name in ("trl/llama3_2", "trl/gemma3", "trl/gptoss", "axolotl/phi_4"):
        with pytest.raises(PromptError, match="no switch for thinking"):
            compiled[name].thinking(True)
