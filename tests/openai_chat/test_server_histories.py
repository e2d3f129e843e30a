"""Histories that a server keeps: what a link records of them, and which references it lets through."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from warmprefix import Branch, ContextBlock
from warmprefix_openai import EngineLink
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer

MODEL = "warmprefix-emulator"
NOTE = re.compile(r"Please also use the context labelled ((?:\[[^\]]*\](?:, )?)+) above")
TEXTS = {name: f"Passage {name} is about subject {name}. " * 12 for name in "abcdef"}


class Engine:
    """An emulator whose prompts are checked as the model gets them."""

    def __init__(self) -> None:
        config = EmulatorConfig(kv_blocks=8_192, prefill_rate=1e9, base_ttft_ms=0, decode_rate=1e9)
        self.server = EmulatorServer(config, reader=self._read)
        self.prompts: list[str] = []

    def _read(self, messages: Sequence[ChatMessage]) -> str:
        self.prompts.append("\n".join(message.text for message in messages))
        return f"answer {len(self.prompts)}"

    def check(self, names: str, *, references: int) -> None:
        """Check that the newest prompt holds these passages once each, this many of them by reference alone."""
        prompt = self.prompts[-1]
        assert {name: prompt.count(TEXTS[name]) for name in names} == dict.fromkeys(names, 1)
        *_, last = prompt.split("answer ")
        labels = [label for note in NOTE.findall(last) for label in re.findall(r"\[([^\]]*)\]", note)]
        assert len(labels) == references
        for label in labels:
            assert f"[{label}] {TEXTS[label[0]]}" in prompt[: len(prompt) - len(last)]


@pytest.fixture
def planner(planner: Any) -> Any:
    """Return a planner whose references are read here by their labels."""
    return type(planner)(annotate="both")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    with engine.server:
        yield engine


class Chat:
    """An application that keeps ids of responses and no messages."""

    def __init__(self, caller: Any, planner: Any, engine: Engine) -> None:
        self._caller, self._planner = caller, planner
        self._options = {"base_url": engine.server.base_url}

    def plan(self, names: str, **options: Any) -> Any:
        blocks = [ContextBlock(TEXTS[name], id=name) for name in names]
        return self._planner.plan(blocks, placement="tail", **options)

    def turn(self, plan: Any, *, header: bool = False, **call: Any) -> Any:
        """Send a plan; return the response."""
        call = {"model": MODEL, "input": f"{plan.render()}\n\nWhy?", **call}
        link = self._caller.link

        def blocking(client: openai.OpenAI) -> Any:
            if header:
                return _last(client.responses.create(**call, extra_headers=link.headers(plan)))
            with link.sending(plan):
                return _last(client.responses.create(**call))

        async def awaited(client: openai.AsyncOpenAI) -> Any:
            if header:
                return await _alast(await client.responses.create(**call, extra_headers=link.headers(plan)))
            async with link.sending(plan):
                return await _alast(await client.responses.create(**call))

        return self._caller.run(blocking, awaited, **self._options)

    def follow(self, names: str, after: str | None, **call: Any) -> Any:
        """Send a turn behind another one."""
        plan = self.plan(names, conversation=Branch(after=after))
        return self.turn(plan, previous_response_id=after, **call)


def _last(answer: Any) -> Any:
    return answer if not isinstance(answer, openai.Stream) else _response_of(list(answer))


async def _alast(answer: Any) -> Any:
    return answer if not isinstance(answer, openai.AsyncStream) else _response_of([event async for event in answer])


def _response_of(events: list[Any]) -> Any:
    assert events[-1].type == "response.completed"
    return events[-1].response


@pytest.fixture
def chat(caller: Any, planner: Any, engine: Engine) -> Chat:
    return Chat(caller, planner, engine)


@pytest.mark.parametrize("call", [{}, {"stream": True}, {"header": True}, {"header": True, "stream": True}])
def test_branch_refers_to_what_its_chain_holds(chat: Chat, engine: Engine, call: dict[str, Any]) -> None:
    first = chat.follow("abc", None, **call)
    engine.check("abc", references=0)
    second = chat.follow("bd", first.id, **call)
    engine.check("abcd", references=1)
    chat.follow("de", first.id, **call)  # a fork does not hold d
    engine.check("abcde", references=0)
    third = chat.follow("ad", second.id, **call)
    engine.check("abcd", references=2)
    chat.follow("", third.id, **call)
    chat.follow("ade", third.id, **call)
    engine.check("abcde", references=2)
    assert (third.usage.input_tokens_details.cached_tokens > third.usage.input_tokens - 60) is True


def test_turn_without_evidence_carries_the_record_on(chat: Chat, engine: Engine) -> None:
    first = chat.follow("ab", None)
    second = chat.follow("", first.id)
    chat.follow("ab", second.id)
    engine.check("ab", references=2)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_a_loop_around_a_plan_carry_the_record_on(
    chat: Chat, engine: Engine, caller: Any, planner: Any, stream: bool
) -> None:
    plan = chat.plan("ab", conversation=Branch(after=None), tenant="acme")
    calls: list[dict[str, Any]] = [{"input": plan.render()}, {"input": "Tool: 7"}, {"input": "Go on."}]

    def blocking(client: openai.OpenAI) -> Any:
        last: Any = None
        with caller.link.sending(plan):
            for call in calls:
                after = None if last is None else last.id
                answer = client.responses.create(model=MODEL, **call, previous_response_id=after, stream=stream)
                last = _last(answer)
        return last

    async def awaited(client: openai.AsyncOpenAI) -> Any:
        last: Any = None
        async with caller.link.sending(plan):
            for call in calls:
                after = None if last is None else last.id
                answer = await client.responses.create(model=MODEL, **call, previous_response_id=after, stream=stream)
                last = await _alast(answer)
        return last

    last = caller.run(blocking, awaited, base_url=engine.server.base_url)
    assert len(planner.turns) == 3
    assert planner.turns[-1] == last.id
    again = chat.plan("ab", conversation=Branch(after=last.id), tenant="acme")
    assert len(again.references) == 2
    assert chat.plan("ab", conversation=Branch(after=last.id)).references == ()
    chat.turn(again, previous_response_id=last.id)
    engine.check("ab", references=2)
    assert planner.stats().open_plans == 1
    stats = caller.link.stats()
    assert (stats.requests, stats.commits, stats.repeated_plans, stats.unmatched) == (4, 4, 0, 0)


@pytest.mark.parametrize(("header", "shown"), [(False, "bc"), (True, "bc"), (False, "b")])
def test_other_request_with_blocks_of_a_plan_is_no_turn_without_blocks(
    chat: Chat, caller: Any, engine: Engine, header: bool, shown: str
) -> None:
    first = chat.follow("a", None)
    plan = chat.plan("bc", conversation=Branch(after=first.id))
    text = "\n\n".join([planned.render() for planned in plan.blocks if planned.block.id in shown])
    call: dict[str, Any] = {"model": MODEL, "input": f"{text}\n\nWhy?", "previous_response_id": first.id}

    def blocking(client: openai.OpenAI) -> Any:
        given = {"extra_headers": caller.link.headers(plan)} if header else {}
        with caller.link.sending(plan):
            return [client.responses.create(**call, **given) for _ in range(2)]

    async def awaited(client: openai.AsyncOpenAI) -> Any:
        given = {"extra_headers": caller.link.headers(plan)} if header else {}
        async with caller.link.sending(plan):
            return [await client.responses.create(**call, **given) for _ in range(2)]

    _, second = caller.run(blocking, awaited, base_url=engine.server.base_url)
    other = chat._planner.plan(
        [ContextBlock(TEXTS["d"], id="b")], placement="tail", conversation=Branch(after=second.id)
    )
    assert f"[b] {TEXTS['b']}" in engine.prompts[-1]
    assert f"[b] {TEXTS['d']}" not in other.render()  # another text has this label in that history


def test_unknown_response_is_the_engines_to_refuse(chat: Chat, engine: Engine, planner: Any) -> None:
    plan = chat.plan("ab", conversation=Branch(after="resp_1"))
    assert plan.references == ()
    with pytest.raises(openai.NotFoundError, match="Response with id 'resp_1' not found"):
        chat.turn(plan, previous_response_id="resp_1")
    assert planner.fates == ["abandon"]


@pytest.mark.parametrize(
    "call", [{"store": False}, {"max_output_tokens": 1}, {"truncation": "auto"}, {"context_management": []}]
)
def test_turn_is_recorded_if_the_server_keeps_all_of_it(
    chat: Chat, engine: Engine, planner: Any, call: dict[str, Any]
) -> None:
    is_kept = "context_management" in call or "max_output_tokens" in call
    first = chat.follow("ab", None, **call)
    assert planner.fates == ["commit"]
    assert planner.turns == [first.id if is_kept else None]
    assert len(chat.plan("ab", conversation=Branch(after=first.id)).references) == (2 if is_kept else 0)


@pytest.mark.parametrize("call", [{"stream": True}, {}])
def test_blocks_that_a_continuation_lacks_are_not_recorded(
    chat: Chat, engine: Engine, planner: Any, call: dict[str, Any]
) -> None:
    plan = chat.plan("ab", conversation=Branch(after=None))
    first = chat.turn(plan, input="Why?", instructions=plan.render(), **call)
    assert planner.turns == [None]
    chat.follow("ab", first.id)
    engine.check("ab", references=0)


def test_short_block_is_not_taken_for_a_word_of_the_question(chat: Chat, planner: Any) -> None:
    blocks = [ContextBlock("yes", id="a"), ContextBlock(TEXTS["b"], id="b")]
    plan = planner.plan(blocks, placement="tail", conversation=Branch(after=None))
    chat.turn(plan, input=f"{plan.blocks[1].render()}\n\nIs it yes?", instructions=plan.blocks[0].render())
    assert planner.turns == [None]


@pytest.mark.parametrize(
    "other",
    [{"previous_response_id": None}, {"truncation": "auto"}, {"context_management": [{"type": "compaction"}]}, "fork"],
)
def test_references_that_the_request_does_not_back_are_written_out(
    chat: Chat, engine: Engine, planner: Any, other: Any
) -> None:
    first = chat.follow("abc", None)
    fork = chat.follow("d", None)
    plan = chat.plan("ae", conversation=Branch(after=first.id))
    assert len(plan.references) == 1
    other = {"previous_response_id": fork.id} if other == "fork" else other
    answer = chat.turn(plan, **{"previous_response_id": first.id, **other})
    assert "labelled" not in engine.prompts[-1].split("answer ")[-1]
    assert TEXTS["a"] in engine.prompts[-1].split("answer ")[-1]
    assert planner.turns == [first.id, fork.id, None]
    assert chat.plan("ae", conversation=Branch(after=answer.id)).references == ()


def test_several_references_are_written_out_behind_the_history_of_the_input(chat: Chat, engine: Engine) -> None:
    first = chat.follow("abc", None)
    plan = chat.plan("cab", conversation=Branch(after=first.id))
    note = plan.render()
    assert len(NOTE.findall(note)) == 1
    items = [
        {"role": "user", "content": note},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": [{"type": "input_text", "text": f"{note}\n\nWhy?"}]},
    ]
    chat.turn(plan, input=items)
    assert engine.prompts[-1].startswith(f"{note}\nanswer 0\n[c")
    engine.check("abc", references=0)


def test_references_in_instructions_are_written_out_too(chat: Chat, engine: Engine) -> None:
    first = chat.follow("abc", None)
    plan = chat.plan("ab", conversation=Branch(after=first.id))
    separate = "\n".join(planned.render() for planned in plan.blocks)
    for instructions in (plan.render(), separate):
        chat.turn(chat.plan("ab", conversation=Branch(after=first.id)), input="Why?", instructions=instructions)
        engine.check("ab", references=0)


def test_history_that_the_application_shows_as_well_keeps_its_references(chat: Chat, engine: Engine) -> None:
    first = chat.follow("ab", None)
    plan = chat.plan("a", conversation=Branch(after=first.id))
    shown = engine.prompts[-1]
    items = [{"role": "user", "content": shown}, {"role": "user", "content": plan.render()}]
    chat.turn(plan, input=items)
    assert engine.prompts[-1] == f"{shown}\n{plan.render()}"


def test_named_conversation_counts_what_its_server_confirms(chat: Chat, engine: Engine, planner: Any) -> None:
    with openai.OpenAI(base_url=engine.server.base_url, api_key="none") as plain:
        name = plain.conversations.create().id
    turns: list[tuple[str, dict[str, Any], int]] = [
        ("ab", {"max_output_tokens": 1}, 0),
        ("ab", {}, 0),
        ("bc", {"store": False}, 1),
        ("bc", {"stream": True}, 1),
        ("abc", {}, 3),
    ]
    for names, call, references in turns:
        plan = chat.plan(names, conversation=name)
        assert len(plan.references) == references
        chat.turn(plan, conversation={"id": name}, **call)
    assert planner.fates == ["abandon", "commit", "abandon", "commit", "commit"]
    assert all(TEXTS[label] in engine.prompts[-1] for label in "abc")
    plan = chat.plan("a", conversation=name)
    chat.turn(plan, conversation=name, truncation="auto")
    assert TEXTS["a"] in engine.prompts[-1].split("answer ")[-1]


def test_name_of_a_conversation_that_the_engine_ignores_counts_as_unseen(
    caller: Any, scripted: Any, planner: Any, reply: Any
) -> None:
    response = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": {}}
    scripted.script.append(reply([json.dumps(response).encode()]))
    plan = planner.plan([ContextBlock(TEXTS["a"], id="a")], conversation="conv_1", placement="tail")
    call: Any = {"model": "m", "input": plan.render(), "conversation": "conv_1"}
    headers = caller.link.headers(plan)

    async def awaited(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(**call, extra_headers=headers)

    caller.run(lambda client: client.responses.create(**call, extra_headers=headers), awaited)
    assert planner.fates == ["abandon"]


def test_sessions_of_chat_completions_hold_nothing(caller: Any, planner: Any, engine: Engine) -> None:
    blocks = [ContextBlock(TEXTS[name], id=name) for name in "ab"]
    for references in (0, 2):
        plan = planner.plan(blocks, conversation="chat-1", placement="tail")
        assert len(plan.references) == references
        messages = [{"role": "user", "content": plan.render()}]
        with caller.link.sending(plan):
            caller.ask(
                sdk={"base_url": engine.server.base_url}, messages=messages, extra_body={"session_params": {"id": "s"}}
            )
        engine.check("ab", references=0)


def test_application_that_makes_its_own_ids_gives_them(
    link: EngineLink, planner: Any, engine: Engine, blocks: Any
) -> None:
    with openai.OpenAI(base_url=engine.server.base_url, api_key="none", http_client=link.http_client()) as client:
        messages: list[Any] = []
        for number, references in enumerate((0, 4)):
            after = f"m{number - 1}" if number else None
            plan = planner.plan(blocks, conversation=Branch(after=after), placement="tail")
            assert len(plan.references) == references
            messages.append({"role": "user", "content": plan.render()})
            with link.sending(plan, turn_id=f"m{number}"):
                answer = client.chat.completions.create(model=MODEL, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    for turn_id, error in ((7, TypeError), ("", ValueError), ("m" * 1_025, ValueError)):
        with pytest.raises(error, match="turn_id"):
            link.sending(planner.plan(blocks), turn_id=turn_id)  # type: ignore[arg-type]


def test_tenants_share_no_turns(chat: Chat, engine: Engine) -> None:
    plan = chat.plan("ab", conversation=Branch(after=None), tenant="one")
    first = chat.turn(plan)
    assert len(chat.plan("ab", conversation=Branch(after=first.id), tenant="one").references) == 2
    assert chat.plan("ab", conversation=Branch(after=first.id), tenant="two").references == ()
    assert chat.plan("ab", conversation=Branch(after=first.id)).references == ()
