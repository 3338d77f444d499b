"""Conversations over the scripted session and over real tiny bundles of both flavours.

The yardstick everywhere: what a fresh generation of the whole rendered history gives.
"""

import numpy as np
import pytest

from kvconv.errors import CacheFullError, KvconvError, PromptError
from kvconv.runtime import Conversation, Generator, SamplingParams
from kvconv.runtime.chat_template import ChatTemplate
from scripted_session import TOKENIZER, ScriptedSession, collect, hashed
from tiny_bundle import CHAT_TEMPLATE, EOS, write_bundle

SHORT = SamplingParams(max_new_tokens=12)
STRIPS_OLD_TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:1] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}[assistant] "
)


def letters(seen: list[int]) -> int:
    """Script letters that depend on everything, and EOS now and then."""
    value = hashed(seen)
    return EOS if value == EOS else ord("a") + value % 26


def scripted(script=letters, template: str = CHAT_TEMPLATE, **options) -> Generator:
    generator = Generator(ScriptedSession(script), TOKENIZER, **options)
    generator.chat_template = ChatTemplate(template, {"bos_token": "<s>"})
    return generator


def answer(conversation: Conversation, text: str, params: SamplingParams = SHORT) -> list[int]:
    return [event.token_id for event in conversation.say(text, params)]


def fresh(conversation: Conversation, text: str, params: SamplingParams = SHORT) -> list[int]:
    """Return the answer of a generation that has no cache."""
    messages = [*conversation.messages, {"role": "user", "content": text}]
    generator = conversation._generator
    return collect(generator, [generator.encode_chat(messages)], params)[0][0]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRIPS_OLD_TURNS], ids=["plain", "strips"])
@pytest.mark.parametrize(
    "params",
    [
        SHORT,
        SamplingParams(max_new_tokens=12, repetition_penalty=1.5),
        SamplingParams(max_new_tokens=12, temperature=5.0, seed=3, repetition_penalty=1.2),
        SamplingParams(max_new_tokens=12, stop=("e", "q")),
    ],
    ids=["greedy", "penalty", "sampled", "stop"],
)
def test_every_answer_equals_that_of_a_fresh_prompt(template, params):
    conversation = Conversation(scripted(template=template), [{"role": "system", "content": "S"}])
    reused = []
    for text in ("Hi", "Who?", "", "今日は 🙂", "Who?", "Bye"):
        expected = fresh(conversation, text, params)
        assert answer(conversation, text, params) == expected
        reused.append(conversation.turn.cached_tokens)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        *6 * ("user", "assistant"),
    ]
    assert reused[0] == 0
    assert reused[1:] == sorted(reused[1:])
    assert reused[1] > len("<s>[system] S\n[user] Hi") - 2


def test_turn_runs_only_what_is_new():
    generator = scripted(lambda seen: EOS if seen[-1] == ord("k") else ord("k"))
    conversation = Conversation(generator)
    answer(conversation, "x" * 600)
    generator.session.run_lengths.clear()
    answer(conversation, "Hi")
    # "k" is cached; the EOS after it is not part of this template's history.
    new = len("\n[user] Hi\n[assistant] ")
    assert generator.session.run_lengths == [new, 1]
    assert conversation.turn.prompt_tokens - conversation.turn.cached_tokens == new
    assert conversation.messages[-1] == {"role": "assistant", "content": "k"}


def test_last_token_of_the_prompt_is_run_though_it_is_cached():
    conversation = Conversation(scripted())
    first = answer(conversation, "Hi")
    conversation.undo()
    assert answer(conversation, "Hi") == first
    assert conversation.turn.cached_tokens == conversation.turn.prompt_tokens - 1


def test_ids_that_tokenize_differently_shorten_what_is_kept():
    # Half a character, cut by max_new_tokens, becomes U+FFFD in the history.
    conversation = Conversation(scripted(lambda seen: "é".encode()[0]))
    answer(conversation, "Hi", SamplingParams(max_new_tokens=3))
    assert conversation.messages[-1]["content"].endswith("\ufffd")
    expected = fresh(conversation, "And?", SHORT)
    assert answer(conversation, "And?", SHORT) == expected
    assert conversation.turn.cached_tokens == len("[user] Hi\n[assistant] ") + 1


@pytest.mark.parametrize("edit", ["undo", "reset", "set_system", "messages"])
def test_edited_history_counts_from_the_next_turn_on(edit):
    conversation = Conversation(scripted(), [{"role": "system", "content": "Be brief"}])
    answer(conversation, "Hi")
    answer(conversation, "Who?")
    match edit:
        case "undo":
            assert conversation.undo()
            assert [m["content"] for m in conversation.messages[:2]] == ["Be brief", "Hi"]
            assert len(conversation.messages) == 3
        case "reset":
            conversation.reset()
            assert conversation.messages == [{"role": "system", "content": "Be brief"}]
            assert not conversation.undo()
        case "set_system":
            conversation.set_system("")
            assert conversation.messages[0]["role"] == "user"
            conversation.set_system("Be long")
            conversation.set_system("Be longer")
            assert [m["content"] for m in conversation.messages[:2]] == ["Be longer", "Hi"]
        case "messages":
            conversation.messages[2]["content"] = "something else"
    assert answer(conversation, "Bye") == fresh_after(conversation)


def fresh_after(conversation: Conversation) -> list[int]:
    """Return what a fresh prompt gives for the turn that was just said."""
    before = conversation.messages[:-1]
    generator = conversation._generator
    return collect(generator, [generator.encode_chat(before)], SHORT)[0][0]


def test_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on():
    conversation = Conversation(scripted(lambda seen: ord("k"), max_sequence_length=60))
    answer(conversation, "Hi", SamplingParams(max_new_tokens=4))
    before = [dict(message) for message in conversation.messages]
    with pytest.raises(CacheFullError, match="--max-sequence-length") as caught:
        conversation.say("x" * 40)
    assert caught.value.capacity == 60
    assert caught.value.needed > 60
    assert conversation.messages == before
    assert answer(conversation, "Ok") == fresh_after(conversation)


def test_answer_ends_with_length_where_the_cache_is_full():
    conversation = Conversation(scripted(lambda seen: ord("k"), max_sequence_length=30))
    events = list(conversation.say("Hi", SamplingParams(max_new_tokens=200)))
    assert events[-1].finish_reason == "length"
    assert len(events) == 30 - len("s[user] Hi\n[assistant] ")


def test_closed_answer_stays_as_far_as_it_was_yielded():
    conversation = Conversation(scripted(lambda seen: ord("k")))
    events = conversation.say("Hi", SHORT)
    shown = "".join(next(events).text for _ in range(3))
    events.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    assert shown == "kkk"
    assert answer(conversation, "And?") == fresh_after(conversation)


def test_next_turn_closes_an_answer_that_is_open():
    conversation = Conversation(scripted(lambda seen: ord("k")))
    events = conversation.say("Hi", SHORT)
    next(events)
    ids = answer(conversation, "And?")
    assert list(events) == []
    assert [m["content"] for m in conversation.messages[:3]] == ["Hi", "k", "And?"]
    assert ids == fresh_after(conversation)


def test_answer_that_is_never_read_changes_nothing():
    conversation = Conversation(scripted())
    conversation.say("Hi", SHORT)
    assert conversation.messages == []
    assert answer(conversation, "Ho") == fresh_after(conversation)


def show(events, pieces: list[str]) -> None:
    for event in events:
        pieces.append(event.text)  # one by one: what was shown stays when an event fails


@pytest.mark.parametrize("run", range(6))
@pytest.mark.parametrize("error", [KeyboardInterrupt, KvconvError])
def test_interrupted_anywhere_the_conversation_stays_right(run, error):
    """Stop the second turn in each of its runs: long prefill in three chunks, then decode."""
    generator = scripted(lambda seen: ord("k"))
    conversation = Conversation(generator)
    answer(conversation, "Hi")
    session, calls = generator.session, []
    original = session.run

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == run + 1:
            raise error("now")
        return original(*arguments, **options)

    session.run = interrupted
    pieces = []
    with pytest.raises(error):
        show(conversation.say("x" * 1200, SHORT), pieces)
    session.run = original
    shown = "".join(pieces)
    if run < 3:
        assert shown == ""
        assert len(conversation.messages) == 2, "a turn without any answer is taken back"
    else:
        assert conversation.messages[-1]["content"] == shown == "k" * (run - 2)
    session.run_lengths.clear()
    text = "x" * 1100 if run < 3 else "And?"
    assert answer(conversation, text) == fresh_after(conversation)
    if run in (1, 2):
        kept = conversation.turn.cached_tokens
        assert kept > 512 * run, "chunks that ran before serve the next turn"


def test_variables_reach_the_template():
    template = CHAT_TEMPLATE + "{{ enable_thinking }}"
    generator = scripted(template=template)
    conversation = Conversation(generator, variables=generator.chat_template.thinking(True))
    answer(conversation, "Hi")
    assert TOKENIZER.detokenize(conversation._ids).startswith("[user] Hi\n[assistant] True")


def test_message_that_the_template_refuses_is_not_taken():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    conversation = Conversation(scripted(template=template), [{"role": "system", "content": "S"}])
    with pytest.raises(PromptError, match="no system"):
        conversation.say("Hi")
    conversation.set_system("")
    assert answer(conversation, "Hi")


def test_bundle_without_a_template_is_refused_at_once(tmp_path):
    generator = Generator.open(write_bundle(tmp_path / "base", chat_template=None), threads=1)
    with pytest.raises(PromptError, match="no chat template"):
        Conversation(generator)


SPELLS = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"
COUNTS = "{{ messages | length }} so far"
STRIPS = "{% for m in messages %}{{ m.content[: 9 if loop.revindex < 3 else 1] }}|{% endfor %}"


@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("template", [SPELLS, COUNTS, STRIPS], ids=["spells", "counts", "strips"])
def test_logits_of_a_real_bundle_equal_a_fresh_prefill(tmp_path, attention, template):
    """Both caches, with and without rewinding; the tiny model holds 64 tokens."""
    folder = write_bundle(tmp_path / "bundle", attention=attention, chat_template=template)
    generator = Generator.open(folder, threads=1)
    conversation = Conversation(generator)
    seen = []
    run = generator.session.run

    def remembered(*arguments, **options):
        seen.append(run(*arguments, **options).copy())
        return seen[-1]

    params = SamplingParams(max_new_tokens=5)
    generator.session.run = remembered
    for text in ("ab", "c", "", "de"):
        ids = answer(conversation, text, params)
        prompt = generator.encode_chat(conversation.messages[:-1])
        last = seen[-1][0, -1]
        expected = run(generator.session.new_cache(1, 64), np.array([[*prompt, *ids[:-1]]]))
        np.testing.assert_allclose(last, expected[0, -1], atol=1e-4)


@pytest.mark.parametrize(
    ("model_holds", "chosen", "capacity"),
    [(131072, None, 8192), (4096, None, 4096), (131072, 100_000, 100_000)],
    ids=["long model", "short model", "chosen"],
)
def test_conversation_with_a_long_model_takes_no_cache_of_that_length_unless_asked(
    model_holds, chosen, capacity
):
    generator = scripted()
    generator.max_sequence_length = chosen or model_holds
    generator.has_chosen_length = chosen is not None
    conversation = Conversation(generator)
    assert conversation._cache.capacity == capacity
