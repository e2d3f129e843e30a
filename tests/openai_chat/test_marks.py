"""Which request is which plan's."""

from __future__ import annotations

import json
import threading
from contextvars import copy_context
from typing import Any

import openai
import pytest

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import PLAN_HEADER, EngineLink


@pytest.fixture(autouse=True)
def _answers(scripted: Any, reply: Any, completion: Any) -> None:
    scripted.script.append(reply([json.dumps(completion).encode()]))


def prompt_of(plan: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{plan.render()}\n\nQ?"}]


def test_within_a_block_the_request_with_the_context_is_the_plans(
    caller: Any, scripted: Any, planner: Any, blocks: Any
) -> None:
    plan = planner.plan(blocks, tenant="acme")
    with caller.link.sending(plan):
        caller.ask(messages=[{"role": "user", "content": "Rephrase: Q?"}])
        assert planner.fates == []
        caller.ask(messages=prompt_of(plan))
        assert planner.fates == ["commit"]
        caller.ask(messages=prompt_of(plan))
    caller.ask(messages=prompt_of(plan))
    assert planner.fates == ["commit"]
    # All of them are this tenant's, and so are their cached prefixes.
    assert [seen.body.get("cache_salt") for seen in scripted.seen] == [plan.cache_salt] * 3 + [None]
    stats = caller.link.stats()
    assert (stats.requests, stats.unmatched, stats.repeated_plans) == (1, 1, 1)


def test_a_block_that_sent_nothing_abandons(caller: Any, planner: Any, blocks: Any) -> None:
    with caller.link.sending(planner.plan(blocks)):
        pass
    with pytest.raises(KeyError), caller.link.sending(planner.plan(blocks)):
        raise KeyError
    with caller.link.sending(planner.plan(blocks)):
        caller.ask(messages=[{"role": "user", "content": "Something else."}])
    assert planner.fates == ["abandon"] * 3
    assert planner.stats().open_plans == 0


def test_a_stream_that_is_sent_when_it_is_read_is_read_within_the_block(
    link: EngineLink, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.script[0] = reply(sse("It is."), content_type="text/event-stream")

    def lazy(client: openai.OpenAI, plan: Any, **options: Any) -> Any:
        call: Any = {"model": "m", "messages": prompt_of(plan), "stream": True, **options}
        yield from client.chat.completions.create(**call)

    plan, marked, within, unlucky = (planner.plan(blocks, tenant="acme") for _ in range(4))
    with openai.OpenAI(base_url=scripted.base_url, api_key="none", http_client=link.http_client()) as client:
        for _ in range(2):
            with link.sending(plan):
                stream = lazy(client, plan)
            assert list(stream)
            assert "cache_salt" not in scripted.seen[-1].body
        assert planner.outcomes == [(plan.id, "abandon", None)]
        assert list(lazy(client, marked, extra_headers=link.headers(marked)))
        with link.sending(within):
            assert list(lazy(client, within))
        assert [seen.body["cache_salt"] for seen in scripted.seen[-2:]] == [plan.cache_salt] * 2
        assert planner.fates == ["abandon", "commit", "commit"]
        assert link.stats().unsent == 1
    for _ in range(2):  # each is counted, the first is logged
        with link.sending(planner.plan(blocks)):
            pass
    with pytest.raises(KeyError), link.sending(unlucky):
        raise KeyError
    assert link.stats().unsent == 3
    warnings = [record.getMessage() for record in caplog.records if record.name == "warmprefix"]
    assert [" ended and no request in it carried the plan" in warning for warning in warnings] == [True]


@pytest.mark.parametrize("status", [400, 404, 503])
def test_within_a_block_the_request_that_is_answered_has_the_plan(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, status: int
) -> None:
    answer = scripted.script[0]
    refusal = reply([b'{"error": {"message": "no"}}'], status)
    scripted.script.clear()
    scripted.script.extend([refusal, refusal, answer])
    plan = planner.plan(blocks, tenant="acme")
    with caller.link.sending(plan):
        for _ in range(2):
            with pytest.raises(openai.APIStatusError):
                caller.ask(messages=prompt_of(plan))
            assert (planner.fates, caller.link.stats().waiting) == ([], 1)
        caller.ask(messages=prompt_of(plan))
        assert planner.fates == ["commit"]
    assert planner.fates == ["commit"]
    stats = caller.link.stats()
    assert (stats.requests, stats.repeated_plans, stats.waiting, stats.unsent) == (3, 0, 0, 0)
    # No request is answered.
    scripted.script.append(refusal)
    scripted.script.popleft()
    plan = planner.plan(blocks)
    with caller.link.sending(plan), pytest.raises(openai.APIStatusError):
        caller.ask(messages=prompt_of(plan))
    assert planner.outcomes[-1] == (plan.id, "abandon", None)
    assert (caller.link.stats().waiting, planner.stats().open_plans) == (0, 0)


def test_within_a_block_a_failure_waits_as_long_as_the_block(
    scripted: Any, planner: Any, blocks: Any, reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmprefix_openai.tracker._GRACE_SECONDS", 0.0)
    answer = scripted.script[0]
    plan = planner.plan(blocks)
    with EngineLink(planner) as link, link.http_client() as client, link.sending(plan):
        url, body = f"{scripted.base_url}/chat/completions", {"messages": prompt_of(plan)}
        scripted.script.extendleft([reply([], 503)])
        client.post(url, json=body)
        link._tracker._give_up_overdue()
        assert planner.fates == []
        with link.sending(plan):  # an inner block of the same plan ends nothing
            pass
        assert planner.fates == []
        assert scripted.script[0] is answer
        client.post(url, json=body)
        assert planner.fates == ["commit"]


async def test_a_block_of_tasks_is_their_own(link: EngineLink, planner: Any, blocks: Any) -> None:
    async with link.sending(planner.plan(blocks)):
        pass
    assert planner.fates == ["abandon"]


def test_the_innermost_block_counts_and_each_link_has_its_own(
    caller: Any, scripted: Any, planner: Any, blocks: Any
) -> None:
    other_planner = ContextPlanner()
    outer, inner = planner.plan(blocks[:2], tenant="a"), planner.plan(blocks[2:], tenant="b")
    with EngineLink(other_planner) as other, caller.link.sending(outer):
        with caller.link.sending(inner), other.sending(other_planner.plan(blocks)):
            caller.ask(messages=prompt_of(inner))
        caller.ask(messages=prompt_of(outer))
    assert [seen.body["cache_salt"] for seen in scripted.seen] == [inner.cache_salt, outer.cache_salt]
    assert [plan for plan, _, _ in planner.outcomes] == [inner.id, outer.id]
    assert other_planner.stats().abandons == 1


def test_what_was_started_in_a_block_and_outlives_it_is_on_its_own(
    caller: Any, scripted: Any, planner: Any, blocks: Any
) -> None:
    plan = planner.plan(blocks, tenant="acme")
    with caller.link.sending(plan):
        context = copy_context()
    thread = threading.Thread(target=context.run, args=(lambda: caller.ask(messages=prompt_of(plan)),))
    thread.start()
    thread.join()
    assert "cache_salt" not in scripted.seen[-1].body
    assert planner.fates == ["abandon"]


def test_a_block_can_be_left_in_another_context(link: EngineLink, planner: Any, blocks: Any) -> None:
    def generate() -> Any:
        with link.sending(planner.plan(blocks)):
            yield

    generator = generate()
    copy_context().run(next, generator)
    generator.close()
    assert planner.fates == ["abandon"]


def test_a_plan_serves_one_request(caller: Any, scripted: Any, planner: Any, blocks: Any) -> None:
    plan = planner.plan(blocks, tenant="acme")
    headers = caller.link.headers(plan)
    caller.ask(extra_headers=headers)
    caller.ask(extra_headers=headers)
    assert planner.fates == ["commit"]
    assert caller.link.stats().repeated_plans == 1
    assert [seen.body["cache_salt"] for seen in scripted.seen] == [plan.cache_salt] * 2
    assert planner.stats().late_commits == 0


def test_unknown_plans_pass(caller: Any, scripted: Any, planner: Any, blocks: Any) -> None:
    other = ContextPlanner()
    with EngineLink(other) as elsewhere:
        unknown = elsewhere.headers(other.plan(blocks, tenant="acme"))
    for headers in (unknown, {PLAN_HEADER: "nonsense"}, {PLAN_HEADER.upper(): "nonsense"}):
        caller.ask(extra_headers=headers)
        assert PLAN_HEADER not in scripted.seen[-1].headers
        assert "cache_salt" not in scripted.seen[-1].body
    assert caller.link.stats().unknown_plans == 3
    # This link has the plan, its planner does not.
    foreign = other.plan(blocks)
    caller.ask(extra_headers=caller.link.headers(foreign))
    assert caller.link.stats().refused_commits == 1
    assert other.stats().open_plans == 2


def test_the_number_of_plans_is_bounded(
    planner: Any, scripted: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmprefix_openai.plans._MAX_PLANS", 2)
    with EngineLink(planner) as link, link.http_client() as client:
        headers = [link.headers(planner.plan(blocks)) for _ in range(3)]
        url = f"{scripted.base_url}/chat/completions"
        for header in headers:
            client.post(url, headers=header, json={"messages": []})
        stats = link.stats()
    assert (stats.unknown_plans, stats.commits) == (1, 2)


def test_other_routes_keep_their_bodies(caller: Any, scripted: Any, planner: Any, blocks: Any) -> None:
    plan = planner.plan(blocks, tenant="acme")
    call = {"model": "m", "input": "text", "encoding_format": "float"}
    scripted.script[0] = scripted.script[0]._replace(
        pieces=[
            json.dumps({"data": [{"embedding": [1.0], "index": 0, "object": "embedding"}], "object": "list"}).encode()
        ]
    )
    headers = caller.link.headers(plan)
    caller.run(
        lambda client: client.embeddings.create(**call, extra_headers=headers),
        lambda client: client.embeddings.create(**call, extra_headers=headers),
    )
    assert scripted.seen[0].body == call
    assert PLAN_HEADER not in scripted.seen[0].headers
    assert planner.fates == []
    assert caller.link.stats().unmatched == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"token_ids": "tgi"}, "token_ids"), ({"primes": 3}, "primes")],
)
def test_other_values_are_named(planner: Any, wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineLink(planner, **wrong)


def test_a_plan_is_a_plan(link: EngineLink) -> None:
    with pytest.raises(TypeError, match="plan must be a ContextPlan"):
        link.headers(ContextBlock("x"))  # type: ignore[arg-type]
