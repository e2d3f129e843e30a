"""Messages of public functions for bad arguments: they name the argument, what is allowed, and the value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from warmprefix_kv_events.kv_feed import FeedBounds, KvEventFeed
from warmprefix_kv_events.spans import EngineTokenizer
from warmprefix_openai.cache_metrics import capacity_from_metrics

ADDRESS = "tcp://host:port or ipc://path"


def feed(**arguments: Any) -> KvEventFeed:
    bounds = FeedBounds(**{name: arguments.pop(name) for name in FeedBounds.__slots__ if name in arguments})
    return KvEventFeed(**{"endpoint": "tcp://host:1", "tokenizer": ord, "bounds": bounds, **arguments})


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"endpoint": []}, "at least one address"),
        ({"endpoint": "nowhere"}, ADDRESS),
        ({"endpoint": "tcp://host"}, ADDRESS),
        ({"endpoint": "tcp://:5557"}, ADDRESS),
        ({"endpoint": "tcp://host:65536"}, ADDRESS),
        ({"endpoint": "udp://host:1"}, ADDRESS),
        ({"endpoint": "ipc:///tmp/x", "ranks": 2}, "tcp://host:port"),
        ({"endpoint": "tcp://host:65535", "ranks": 2}, "tcp://host:port"),
        ({"replay": "nowhere"}, ADDRESS),
        ({"ranks": 0}, "1 or more"),
        ({"max_queue": 0}, "1 or more"),
        ({"max_messages": 0}, "1 or more"),
        ({"max_kv_blocks": 0}, "1 or more"),
        ({"max_prompts": 0}, "1 or more"),
        ({"max_prompt_blocks": -3}, "1 or more"),
        ({"high_water_mark": -1}, "0 or more"),
        ({"replay_timeout": 0}, "positive"),
        ({"replay_cooldown": -2.5}, "positive"),
    ],
)
def test_a_feed_names_the_argument_the_value_and_what_is_allowed(arguments: dict[str, Any], allowed: str) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=rf"^{name} must (be|have) {re.escape(f'{allowed}, got {value!r}')}"):
        feed(**arguments)


def test_a_feed_names_the_numbers_of_addresses() -> None:
    with pytest.raises(ValueError, match=r"^replay must have one address per endpoint, got 2 for 1$"):
        feed(replay=["tcp://a:1", "tcp://b:1"])


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "file:///etc/passwd", "http://"])
def test_a_tokenizer_names_the_url(url: str) -> None:
    with pytest.raises(ValueError, match=f"^base_url must be an http or https URL, got {url!r}$"):
        EngineTokenizer(url)


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_a_tokenizer_names_the_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"^timeout must be positive, got {timeout}$"):
        EngineTokenizer("http://engine", timeout=timeout)


@pytest.mark.parametrize("source", ["file:///etc/passwd", "tcp://engine:1"])
def test_capacity_from_metrics_names_the_source(source: str) -> None:
    with pytest.raises(ValueError, match=f"^source must be an http or https address, or the text .*, got {source!r}$"):
        capacity_from_metrics(source)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import warmprefix_kv_events

    with pytest.raises(AttributeError, match="module 'warmprefix_kv_events' has no attribute 'KvFeed'"):
        warmprefix_kv_events.KvFeed  # noqa: B018


def test_every_public_name_exists() -> None:
    import warmprefix.residency
    import warmprefix_kv_events

    for package in (warmprefix.residency, warmprefix_kv_events):
        assert all(hasattr(package, name) for name in package.__all__)
