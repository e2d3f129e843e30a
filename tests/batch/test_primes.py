"""Primes of a planned batch, for engines that continue only from checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import BatchPlan, BatchRequest, ContextBlock, ContextPlanner
from warmprefix.batch.primes import prime_gain
from warmprefix.cache_profiles import Checkpoints
from warmprefix_openai.primer import cut_chat
from warmprefix_requests.prefixes import EXACT_END, one_token

PREAMBLE = "Answer briefly."


def block(name: str, tokens: int) -> ContextBlock:
    return ContextBlock(f"The text of {name}.", id=name, tokens=tokens)


A, B, C, D = (block(name, 200) for name in "ABCD")


def plan(contexts: list[list[ContextBlock]], profile: str = "vllm-checkpoints(128,16)") -> BatchPlan:
    requests = [BatchRequest(i, context, f"Question {i}?") for i, context in enumerate(contexts)]
    return ContextPlanner(profile=profile).plan_batch(requests, preamble=PREAMBLE)


def test_a_prime_stands_in_front_of_the_first_request_behind_a_shared_prefix() -> None:
    batch = plan([[A, B], [C, D], [A, D], [C, A]])
    first: dict[bytes, str] = {}
    for planned in batch:
        first.setdefault(planned.blocks[0].block.fingerprint, planned.id)
    shared = [prime for prime in batch.primes if prime.depth == 1]
    assert shared
    for prime in shared:
        assert first[prime.before.blocks[0].block.fingerprint] == prime.before.id
    places = [batch.positions[prime.before.id] for prime in batch.primes]
    assert places == sorted(places)


def test_a_prime_ends_one_character_behind_the_shared_blocks() -> None:
    (prime,) = plan([[A, B], [A, C]]).primes
    first = prime.before.blocks[1].text[0]
    messages = cut_chat(prime.before.messages(), prime.shared_text)
    assert messages is not None
    assert messages == [
        {"role": "system", "content": PREAMBLE},
        {"role": "user", "content": f"The text of A.\n\n{first}"},
    ]
    request = one_token("chat", {"model": "model", "messages": messages})
    assert request.body["max_tokens"] == 1
    assert EXACT_END.items() <= request.body.items()
    assert request.plain is not None
    assert EXACT_END.keys().isdisjoint(request.plain.body)


def test_a_prime_has_its_tenants_salt() -> None:
    requests = [BatchRequest(i, [A, other], tenant="acme") for i, other in enumerate((B, C))]
    (prime,) = ContextPlanner(profile="vllm-checkpoints(128)").plan_batch(requests).primes
    assert prime.before.cache_salt is not None


def test_tenants_share_no_prime() -> None:
    requests = [BatchRequest(i, [A, B], tenant=tenant) for i, tenant in enumerate(("acme", "other"))]
    assert ContextPlanner(profile="vllm-checkpoints(128)").plan_batch(requests).primes == ()


def test_other_engines_get_no_primes() -> None:
    assert plan([[A, B], [A, C]], "full-attention").primes == ()


def test_a_prefix_shorter_than_the_unit_gets_none() -> None:
    assert plan([[A, B], [A, C]], "vllm-checkpoints(528)").primes == ()


def test_a_prime_that_leaves_its_parents_checkpoint_is_not_sent() -> None:
    short = block("E", 20)
    batch = plan([[A, short, B], [A, short, C], [A, D]], "vllm-checkpoints(128)")
    assert [prime.depth for prime in batch.primes] == [1]


def test_prime_gain_counts_each_visit_once() -> None:
    fine, coarse = Checkpoints(128, 16), Checkpoints(128)
    assert prime_gain(coarse, 127, 0, 9) == 0
    assert prime_gain(coarse, 128, 0, 2) == prime_gain(coarse, 128, 0, 9) == 128 - 1 - 32
    assert prime_gain(fine, 120, 0, 3) == 112 + 112 - 7 - 1 - 32
    assert prime_gain(coarse, 300, 256, 9) == 0
    assert prime_gain(coarse, 300, 0, 1) < 0


@pytest.mark.parametrize(
    ("content", "shared", "cut"),
    [
        ("one\n\ntwo", "one", "one\n\nt"),
        ("one\n\ntwo", "", "o"),
        ("one", "one", "one"),
        ("one\n\n", "one", "one"),
        ("head one\n\n two", "one", "head one\n\n t"),
    ],
)
def test_a_chat_is_cut_at_the_first_visible_character(content: str, shared: str, cut: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert cut_chat([*messages, {"role": "assistant", "content": "no"}], shared) == [
        messages[0],
        {"role": "user", "content": cut},
    ]


def test_a_chat_without_the_text_is_not_cut() -> None:
    assert cut_chat([{"role": "user", "content": [{"type": "text", "text": "one"}]}], "one") is None
    assert cut_chat([{"role": "user", "content": "two"}], "one") is None
    assert cut_chat([{"role": "user", "content": ""}], "") is None


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), max_size=12),
    st.sampled_from(["vllm-checkpoints(128)", "vllm-checkpoints(128,16)", "vllm-checkpoints(528,16)"]),
)
def test_each_prime_is_a_prefix_of_two_requests_and_no_other_has_its_checkpoint(
    contexts: list[list[int]], profile: str
) -> None:
    blocks = [block(f"block {number}", 30 + 70 * number) for number in range(7)]
    batch = plan([[blocks[number] for number in context] for context in contexts], profile)
    sent: set[tuple[int, tuple[bytes, ...]]] = set()
    chats = ["\n".join(message["content"] for message in planned.messages()) for planned in batch]
    for prime in batch.primes:
        keys = tuple(planned.block.fingerprint for planned in prime.before.blocks[: prime.depth])
        assert (prime.depth, keys) not in sent
        sent.add((prime.depth, keys))
        messages = cut_chat(prime.before.messages(), prime.shared_text)
        assert messages is not None
        text = "\n".join(message["content"] for message in messages)
        own = "\n".join(message["content"] for message in prime.before.messages())
        assert own.startswith(text)
        assert sum(chat.startswith(text[:-1].rstrip()) for chat in chats) >= 2
