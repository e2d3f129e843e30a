"""Histories that the Responses API keeps, through the OpenAI SDK and LangChain's client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer, stored_items
from warmprefix_tools.emulator.stored_items import STORAGE_SECONDS

INSTANT = EmulatorConfig(kv_blocks=2000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
MODEL = "warmprefix-emulator"


class Engine:
    """An emulator whose prompts are seen as the model gets them."""

    def __init__(self, config: EmulatorConfig = INSTANT) -> None:
        self.prompts: list[list[ChatMessage]] = []
        self.server = EmulatorServer(config, reader=self._read)

    def _read(self, messages: Sequence[ChatMessage]) -> str:
        self.prompts.append(list(messages))
        return f"answer {len(self.prompts)}"

    def client(self, key: str = "one") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.base_url, api_key=key, max_retries=0)

    @property
    def texts(self) -> list[str]:
        """Texts of the newest prompt."""
        return [message.text for message in self.prompts[-1]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    with engine.server:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with engine.client() as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, **options)


def advance(engine: Engine, seconds: float) -> None:
    httpx.post(f"{engine.server.url}/advance_clock", json={"seconds": seconds}).raise_for_status()


def test_response_continues_its_whole_chain_and_none_of_its_instructions(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "one", instructions="Be brief.")
    second = ask(client, "two", previous_response_id=first.id)
    ask(client, "fork", previous_response_id=first.id)
    third = ask(client, "three", previous_response_id=second.id, instructions="Be long.")
    assert third.previous_response_id == second.id
    assert [[message.text for message in prompt] for prompt in engine.prompts] == [
        ["Be brief.", "one"],
        ["one", "answer 1", "two"],
        ["one", "answer 1", "fork"],
        ["Be long.", "one", "answer 1", "two", "answer 2", "three"],
    ]
    assert [message.role for message in engine.prompts[1]] == ["user", "assistant", "user"]


def test_stored_history_has_the_tokens_of_a_shown_one(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "warm prefix " * 200)
    stored = ask(client, "And?", previous_response_id=first.id)
    shown: Any = [
        {"role": "user", "content": "warm prefix " * 200},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    whole: Any = client.responses.create(model=MODEL, input=shown)
    assert stored.usage.input_tokens == whole.usage.input_tokens
    assert whole.usage.input_tokens - whole.usage.input_tokens_details.cached_tokens <= 16
    assert stored.usage.input_tokens_details.cached_tokens > 390


def test_calls_of_tools_and_their_results_are_kept(engine: Engine, client: openai.OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "Found."}
    first = client.responses.create(model=MODEL, input=[{"role": "user", "content": "one"}, call])
    ask_result = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    assert engine.texts[0] == "one"
    assert '"name": "search"' in engine.texts[1]
    assert engine.texts[2:] == ["answer 1", "c1\nFound."]
    listed = client.responses.input_items.list(ask_result.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "message", "function_call_output"]


def test_stored_response_can_be_read_and_deleted(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "one", metadata={"topic": "a"})
    second = ask(client, "two", previous_response_id=first.id)
    assert client.responses.retrieve(first.id) == first
    newest = client.responses.input_items.list(second.id, limit=1)
    assert newest.has_more
    assert [item.to_dict()["content"] for item in newest] == [  # over all pages
        [{"type": "input_text", "text": "two"}],
        [{"type": "output_text", "text": "answer 1", "annotations": [], "logprobs": []}],
        [{"type": "input_text", "text": "one"}],
    ]
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(first.id)
    ask(client, "three", previous_response_id=second.id)
    assert engine.texts == ["two", "answer 2", "three"]  # the chain begins behind what is gone


@pytest.mark.parametrize(("profile", "status"), [("full-attention", 404), ("openai", 400)])
def test_unknown_response_is_refused_in_the_words_of_the_api(profile: str, status: int) -> None:
    engine = Engine(replace(INSTANT, profile=profile))
    with engine.server, engine.client() as client, pytest.raises(openai.APIStatusError) as caught:
        ask(client, "Hi.", previous_response_id="resp_1")
    assert caught.value.status_code == status
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith("esponse with id 'resp_1' not found.")
    assert (error["code"], error["param"]) == (
        ("previous_response_not_found", "previous_response_id") if status == 400 else (404, "response_id")
    )
    assert engine.prompts == []


def test_response_that_is_not_to_be_stored_is_not(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "one", store=False)
    with pytest.raises(openai.NotFoundError):
        ask(client, "two", previous_response_id=first.id)


def test_keys_share_nothing(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "one")
    conversation = client.conversations.create()
    with engine.client("two") as other:
        for call in (
            lambda: ask(other, "two", previous_response_id=first.id),
            lambda: ask(other, "two", conversation=conversation.id),
            lambda: other.responses.retrieve(first.id),
            lambda: other.responses.delete(first.id),
            lambda: other.conversations.delete(conversation.id),
            lambda: other.conversations.items.list(conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


def test_responses_are_stored_for_thirty_days(engine: Engine, client: openai.OpenAI) -> None:
    first = ask(client, "one")
    advance(engine, STORAGE_SECONDS - 60)
    second = ask(client, "two", previous_response_id=first.id)
    advance(engine, 120)
    ask(client, "three", previous_response_id=second.id)
    assert engine.texts == ["two", "answer 2", "three"]
    with pytest.raises(openai.NotFoundError):
        ask(client, "four", previous_response_id=first.id)


def test_oldest_responses_go_when_there_is_no_room(
    engine: Engine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_items, "MAX_STORED", 2)
    ids = [ask(client, "one").id]
    for text in ("two", "three"):
        ids.append(ask(client, text, previous_response_id=ids[-1]).id)
    for response in ids:  # the last two lack a part that the API would show
        with pytest.raises(openai.NotFoundError):
            ask(client, "four", previous_response_id=response)
    assert client.responses.retrieve(ids[-1]).output_text == "answer 3"


def test_stream_stores_its_answer_at_its_end_alone() -> None:
    engine = Engine(replace(INSTANT, decode_rate=2))
    with engine.server, engine.client() as client:
        with client.responses.create(model=MODEL, input="one", stream=True) as events:
            begun: Any = next(iter(events))
        assert begun.type == "response.created"
        *_, last = client.responses.create(model=MODEL, input="one", stream=True)
        assert last.type == "response.completed"
        assert client.responses.retrieve(last.response.id) == last.response
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.response.id)


def test_conversation_gets_the_items_of_what_ends_well(engine: Engine, client: openai.OpenAI) -> None:
    item: Any = {"type": "message", "role": "user", "content": "zero"}
    conversation = client.conversations.create(metadata={"topic": "a"}, items=[item])
    first = ask(client, "one", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    ask(client, "two", conversation={"id": conversation.id}, store=False)
    ask(client, "cut", conversation=conversation.id, max_output_tokens=1)
    ask(client, "three", conversation=conversation.id)
    assert engine.texts == ["zero", "one", "answer 1", "two", "answer 2", "three"]
    ask(client, "four", previous_response_id=first.id)
    assert engine.texts == ["zero", "one", "answer 1", "four"]
    assert len(list(client.conversations.items.list(conversation.id, limit=2))) == 7


def test_conversation_can_be_read_changed_and_deleted(engine: Engine, client: openai.OpenAI) -> None:
    item: Any = {"type": "message", "role": "user", "content": "zero"}
    conversation = client.conversations.create(metadata={"topic": "a"})
    assert client.conversations.retrieve(conversation.id) == conversation
    assert client.conversations.update(conversation.id, metadata={"topic": "b"}).metadata == {"topic": "b"}
    added = client.conversations.items.create(conversation.id, items=[item, item]).data
    assert [item.id for item in client.conversations.items.list(conversation.id, order="asc")] == [
        item.id for item in added
    ]
    assert client.conversations.items.retrieve(str(added[0].id), conversation_id=conversation.id) == added[0]
    assert client.conversations.items.delete(str(added[0].id), conversation_id=conversation.id).id == conversation.id
    ask(client, "one", conversation=conversation.id)
    assert engine.texts == ["zero", "one"]
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        ask(client, "two", conversation=conversation.id)


def test_request_continues_one_thing_alone(engine: Engine, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Mutually exclusive"):
        ask(client, "two", previous_response_id="resp_1", conversation="conv_1")
    with pytest.raises(openai.BadRequestError, match="background"):
        ask(client, "two", background=True)


def test_long_history_is_cut_where_the_request_allows_it() -> None:
    engine = Engine(replace(INSTANT, max_model_len=60))
    with engine.server, engine.client() as client:
        first = ask(client, "warm prefix " * 10, max_output_tokens=5)
        second = ask(client, "warm prefix " * 8, max_output_tokens=5, previous_response_id=first.id, truncation="auto")
        assert engine.texts == ["answer 1", "warm prefix " * 8]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            ask(client, "three", previous_response_id=second.id)
        ask(client, "three", previous_response_id=second.id, truncation="auto", instructions="Be brief.")
        assert engine.texts == ["Be brief.", "answer 1", "warm prefix " * 8, "answer 2", "three"]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            ask(client, "warm prefix " * 100, truncation="auto")


def test_langchain_continues_stored_responses(engine: Engine) -> None:
    chats = pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage

    llm = chats.ChatOpenAI(model=MODEL, base_url=engine.server.base_url, api_key="one", use_previous_response_id=True)
    messages: list[Any] = [HumanMessage("one")]
    for text in ("two", "three"):
        answer = llm.invoke(messages)
        assert isinstance(answer, AIMessage)
        messages += [answer, HumanMessage(text)]
    *_, last = llm.stream(messages)
    assert engine.texts == ["one", "answer 1", "two", "answer 2", "three"]
    assert last.usage_metadata is None or last.usage_metadata["input_tokens"] > 20
