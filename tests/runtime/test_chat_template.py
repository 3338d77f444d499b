"""Chat templates, as several model families write them, against apply_chat_template."""

import datetime
import json

import pytest
import transformers

from kvconv.errors import BundleError, PromptError
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.chat_template import ChatTemplate
from tiny_bundle import BOS, byte_tokenizer, write_bundle

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEMPLATES = {
    "chatml": """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('no system') }}
{% endif %}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    "mistral": """{{- bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}""",
    "loop_controls": """{% for message in messages %}{% if message.role == 'system' %}{% continue %}
{% endif %}{{ message.role }}: {{ message.content }}
{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
    "namespace": """{%- set ns = namespace(count=0, self='kept') %}{% for m in messages %}
{%- set ns.count = ns.count + m.content | length %}{% endfor %}{{ ns.count }} {{ ns.self }}
{{ dict(a=1) | tojson }} {{ undefined_name }}|{{ tools is none }}|{{ unk_token }}""",
    "tojson": """{{ messages | tojson }}
{{ {'b': '<é&>', 'a': [1, None, true]} | tojson(indent=2, sort_keys=True) }}
{{ {'a': 1} | tojson(ensure_ascii=True, separators=(',', ':')) }}""",
    "generation": """{% for m in messages %}{% set mark = 'outer' %}{% if m.role == 'assistant' %}
{% generation %}
  {% set mark = 'inner' %}{{ m.content }}{{ mark }}
{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{{ mark }}
{% endfor %}""",
    "date": "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "macro": """{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}
{% for m in messages %}{{ turn(m) }}{% endfor %}
{% filter upper %}end{% endfilter %}""",
}
CONVERSATIONS = {
    "one_turn": [{"role": "user", "content": " What is <b>this</b> & that? 今日 "}],
    "three_turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "Bye"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ],
    "fields": [
        {"role": "user", "content": "Hi", "name": None, "extra": [None]},
        {"role": "assistant", "content": "Yes?", "reasoning": "They greet."},
    ],
}


def transformers_render(source: str, messages, add_generation_prompt: bool) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)
    return tokenizer.apply_chat_template(
        messages,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompted", "plain"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_transformers(template, conversation, add_generation_prompt):
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    ours = ChatTemplate(source, SPECIAL)
    try:  # what transformers refuses, we refuse in the same words
        expected = transformers_render(source, messages, add_generation_prompt)
    except Exception as error:
        assert (template, conversation) == ("gemma", "system")
        with pytest.raises(PromptError, match=str(error)):
            ours.render(messages, add_generation_prompt=add_generation_prompt)
        return
    found = ours.render(messages, add_generation_prompt=add_generation_prompt)
    assert found == expected


def test_strftime_now_is_now():
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])
    assert text == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_cannot_reach_python(source):
    with pytest.raises(PromptError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_template_that_does_not_compile_is_a_prompt_error():
    with pytest.raises(PromptError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_template_that_fails_is_a_prompt_error():
    with pytest.raises(PromptError, match="refuses"):
        ChatTemplate("{{ 1 + 'a' }}", {}).render([])


def bundle_with(tmp_path, config, template=None) -> Bundle:
    folder = write_bundle(tmp_path / "bundle", chat_template=template)
    bundle = Bundle.open(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return bundle


HELLO = [{"role": "user", "content": "Hi"}]


def test_template_file_comes_before_the_config(tmp_path):
    bundle = bundle_with(tmp_path, {"chat_template": "config"}, "file {{ bos_token is defined }}")
    assert ChatTemplate.open(bundle).render(HELLO) == "file False"


@pytest.mark.parametrize(
    "chat_template",
    [
        "{{ bos_token }}{{ eos_token }}",
        [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
        ],
    ],
    ids=["text", "named"],
)
def test_template_in_the_config_sees_the_special_tokens(tmp_path, chat_template):
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "add_bos_token": True,
        "chat_template": chat_template,
    }
    assert ChatTemplate.open(bundle_with(tmp_path, config)).render(HELLO) == "<s></s>"


def test_template_sees_tokens_that_a_model_names_itself(tmp_path):
    config = {
        "image_token": "<image>",
        "extra_special_tokens": {"audio_token": "<audio>"},
        "model_specific_special_tokens": {"video_token": {"content": "<video>"}},
        "chat_template": "{{ image_token }}{{ audio_token }}{{ video_token }}",
    }
    template = ChatTemplate.open(bundle_with(tmp_path, config))
    assert template.render(HELLO) == "<image><audio><video>"


def test_template_for_tools_is_taken_with_tools(tmp_path):
    named = {"default": "default", "tool_use": "{{ tools | tojson }}"}
    entries = [{"name": name, "template": text} for name, text in named.items()]
    template = ChatTemplate.open(bundle_with(tmp_path, {"chat_template": entries}))
    assert template.render(HELLO) == "default"
    assert template.render(HELLO, tools=[{"name": "f"}]) == '[{"name": "f"}]'


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_sets_the_switch_that_the_template_has(name):
    source = f"{{% if {name} is not defined %}}{{% set {name} = 7 %}}{{% endif %}}{{{{ {name} }}}}"
    template = ChatTemplate(source, {})
    assert template.render(HELLO) == "7"
    for is_on in (True, False):
        assert template.render(HELLO, variables=template.thinking(is_on)) == str(is_on)


def test_thinking_without_a_switch_is_refused():
    with pytest.raises(PromptError, match="no switch for thinking"):
        ChatTemplate("{{ messages[0].thinking }}", {}).thinking(True)


@pytest.mark.parametrize("config", [{}, {"chat_template": []}, {"chat_template": None}], ids=str)
def test_bundle_without_template_says_so(tmp_path, config):
    with pytest.raises(PromptError, match="no chat template"):
        ChatTemplate.open(bundle_with(tmp_path, config))


def test_malformed_list_of_templates_names_the_file(tmp_path):
    with pytest.raises(BundleError) as caught:
        ChatTemplate.open(bundle_with(tmp_path, {"chat_template": ["x"]}))
    assert caught.value.file == "tokenizer_config.json"


def test_bos_of_the_template_is_not_added_twice(tmp_path):
    from kvconv.runtime import Generator

    generator = Generator.open(write_bundle(tmp_path / "bundle"), threads=1)
    assert generator.encode("x", chat_template=True).count(BOS) == 1
    assert generator.encode("x").count(BOS) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{% macro again(n) %}{{ again(n) }}{% endmacro %}{{ again(1) }}",
        "{{ messages | first | nothing }}",
    ],
    ids=["division", "index", "recursion", "filter"],
)
def test_whatever_a_template_trips_over_is_a_prompt_error(source):
    with pytest.raises(PromptError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
