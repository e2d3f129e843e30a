"""Prompts of requests, in the pieces that a router compares."""

from __future__ import annotations

import random
from typing import Any

import pytest

from warmprefix_ray.request_prompts import RequestPrompt, prompt_of_request

WORDS = [f"word{number}" for number in range(200)]


def text_of(rng: random.Random, words: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice((" ", " ", "\n", "、")) for _ in range(words))


def read(request: object) -> RequestPrompt:
    prompt = prompt_of_request(request)
    assert prompt is not None
    return prompt


def chat(*texts: Any, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **fields}


def common(first: RequestPrompt, second: RequestPrompt) -> int:
    """Return the number of first blocks that two prompts share."""
    pairs = zip(first.blocks, second.blocks, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first.blocks), len(second.blocks)))


def test_prompts_share_blocks_as_far_as_their_texts_begin_alike() -> None:
    rng = random.Random(1)
    for _ in range(100):
        shared = text_of(rng, rng.randrange(1_000))
        first, second = (read(chat(shared + end + text_of(rng, rng.randrange(300)))) for end in "AB")
        shared_blocks = common(first, second)
        characters = sum(map(len, first.paragraphs[:shared_blocks]))
        assert characters <= len(shared)
        assert characters > len(shared) - 512 - 64
        assert len(set(first.blocks)) == len(first.blocks)


def test_blocks_cover_the_prompt() -> None:
    text = text_of(random.Random(2), 2_000)
    prompt = read(chat("short", text))
    assert "".join(prompt.paragraphs) == text
    assert abs(sum(block.tokens for block in prompt.blocks) - prompt.tokens) <= len(prompt.blocks)
    assert prompt.tokens == (len(text) + 5) // 4


def test_every_part_of_a_prompt_counts() -> None:
    text = "evidence " * 100
    plain = read(chat(text))
    others: list[dict[str, object]] = [
        chat(text, model="adapter"),
        chat(text, tools=[{"type": "function"}]),
        chat("hello", text),
        {"messages": [{"role": "system", "content": text * 3}]},
        {"messages": [{"role": "user", "content": text, "name": "ann"}]},
        chat([{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": text}]),
        {"prompt": text},
    ]
    for other in others:
        assert common(plain, read(other)) == 0, other
    assert read(chat([{"type": "text", "text": text}], cache_salt="s")).tenant == "s"


def test_a_short_system_prompt_is_the_preamble() -> None:
    def asked(system: str, text: str) -> RequestPrompt:
        return read({"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]})

    text = "evidence " * 100
    short = asked("Be brief. " * 10, text)
    assert short.preamble == asked("Be brief. " * 10, "else").preamble != asked("Be long. " * 10, text).preamble
    assert "".join(short.paragraphs) == text
    assert short.tokens == (100 + len(text)) // 4
    long = asked(text * 3, text)
    assert long.preamble is None
    assert "".join(long.paragraphs) == text * 4


class Model:
    """A message as the model of a library."""

    def __init__(self, content: str) -> None:
        self.content = content

    def model_dump(self, exclude_none: bool) -> dict[str, str]:
        assert exclude_none
        return {"role": "user", "content": self.content}


class Body:
    """A request whose fields are attributes."""

    def __init__(self, text: str) -> None:
        self.messages = [Model(text)]
        self.cache_salt = None


def test_fields_can_be_attributes() -> None:
    text = "evidence " * 100
    assert read(Body(text)).blocks == read(chat(text)).blocks


def test_prompts_of_tokens() -> None:
    first, second = read({"prompt": [*range(300)]}), read({"prompt": [*range(299), 0]})
    assert [block.tokens for block in first.blocks] == [128, 128, 44]
    assert common(first, second) == 2
    assert first.paragraphs == ()


NO_PROMPT: tuple[object, ...] = (
    None,
    "text",
    3,
    {},
    {"prompt": ["a", "b"]},
    {"input": "embed me"},
    {"prompt": []},
    {"prompt": [2**63]},
)


@pytest.mark.parametrize("request_", NO_PROMPT)
def test_other_requests_have_no_prompt(request_: object) -> None:
    assert prompt_of_request(request_) is None
