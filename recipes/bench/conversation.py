"""Measure that a turn of a conversation costs what its new tokens cost, not its history.

Usage: python recipes/bench/conversation.py BUNDLE [--turns 10] [--new-tokens 48] [--threads 2]

After each turn's first token its whole history is run from an empty cache as well, in the same
process, so that a busy machine slows both. Prints a line per turn: tokens of the history, those
that were cached, those that were new, and the milliseconds to the first token both ways. New may
include the end of the last answer, where the tokenizer splits its text in other tokens than the
model chose.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from kvconv.runtime import Conversation, GenerationEvent, Generator, SamplingParams

QUESTIONS = (
    "Tell me about a small town by the sea.",
    "Who lives there? Name three people and what they do all day.",
    "What happens on a stormy night in October?",
    "And the next morning?",
    "Describe the harbour: the boats, the smells, the sounds, and the light on the water at noon.",
    "What does the old fisherman say about it?",
    "Write a short letter from one of the three to a friend in the city.",
    "How does the friend answer?",
    "Do they ever meet again?",
    "End the story in two sentences.",
)


def first_token_ms(events: Iterator[GenerationEvent], started: float) -> tuple[float, int]:
    """Return the time from `started` to the first event, and the first token."""
    event = next(events)
    return 1e3 * (time.perf_counter() - started), event.token_id


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--turns", type=int, default=10, help="turns [10]")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens an answer [48]")
    parser.add_argument("--threads", type=int, default=2, help="threads [2]")
    arguments = parser.parse_args()

    generator = Generator.open(arguments.bundle, threads=arguments.threads)
    params = SamplingParams(max_new_tokens=arguments.new_tokens)
    list(generator.generate([generator.encode("Warm up.")], params))
    conversation = Conversation(generator)
    print("turn  history  cached  new tokens  first token  fresh prefill  ratio")
    for number in range(1, arguments.turns + 1):
        text = QUESTIONS[(number - 1) % len(QUESTIONS)]
        started = time.perf_counter()
        events = conversation.say(text, params)
        kept_ms, token = first_token_ms(events, started)
        history = conversation.messages[:-1]
        started = time.perf_counter()
        fresh = generator.generate([generator.encode_chat(history)], params)
        fresh_ms, fresh_token = first_token_ms(fresh, started)
        assert token == fresh_token, f"turn {number} begins with another token than a fresh prompt"
        for _ in events:
            pass
        turn = conversation.turn
        assert turn is not None
        print(
            f"{number:4}  {turn.prompt_tokens:7}  {turn.cached_tokens:6}  "
            f"{turn.prompt_tokens - turn.cached_tokens:10}  {kept_ms:8.0f} ms  {fresh_ms:10.0f} ms"
            f"  {fresh_ms / kept_ms:5.1f}"
        )


if __name__ == "__main__":
    main()
