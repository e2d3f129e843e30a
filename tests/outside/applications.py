"""Real applications through the gateway to the emulator: several turns with repeated tool results.

    python run.py test --all clients

Each application is installed as its users install it and runs without a screen. It asks a scripted emulator, whose
answers make it call its own tools. Recorders in front of the gateway and behind it compare what the application sent
with what arrived. `WARMPREFIX_CLIENTS` names a folder that has the applications already.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_programs import AGENTS, ANSWER, LAND, QUESTIONS, SEA, AgentProgram, Home, installed, session_script
from client_wire import Recorder, differences, keeps_prefixes, served
from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_tools.emulator import EmulatorConfig, create_app


@dataclass(frozen=True)
class Session:
    """One run of an application, and what was recorded of it."""

    home: Home
    sent: Recorder
    arrived: Recorder

    def check(self, references: int) -> None:
        """Check that nothing but references, this many in the longest prompt, differs from what was sent."""
        assert self.sent.requests
        assert set(self.sent.statuses) == {200}
        assert differences(self.sent.requests, self.arrived.requests) == 0
        assert keeps_prefixes(self.sent.requests, self.arrived.requests)
        texts = [json.dumps(request.body) for request in self.arrived.requests]
        assert max(text.count("ord for word the") for text in texts) == references


@pytest.fixture
def session_of(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Return a factory of sessions, whose answers are those of a script; `land.txt` and `sea.txt` can be read."""
    with ExitStack() as stack:

        def make(script: Sequence[Mapping[str, Any]]) -> Session:
            (tmp_path / "work").mkdir()
            (tmp_path / "work" / "sea.txt").write_text(SEA)
            (tmp_path / "work" / "land.txt").write_text(LAND)
            (tmp_path / "script.json").write_text(json.dumps(script))
            config = EmulatorConfig(
                kv_blocks=40_000,
                prefill_rate=math.inf,
                base_ttft_ms=0,
                decode_rate=math.inf,
                script=tmp_path / "script.json",
            )
            arrived = Recorder(create_app(config))
            upstream = stack.enter_context(served(arrived))
            sent = Recorder(Gateway(GatewayOptions((f"{upstream}/v1",))))
            base_url = f"{stack.enter_context(served(sent))}/v1"
            return Session(Home(tmp_path, base_url, config.model), sent, arrived)

        yield make


REFERENCES = {
    "OpenCode": 4,
    "Codex": 5,
    "Claude Code": 3,  # it does not repeat a read itself
    "OpenClaw": 5,
    "Hermes": 3,  # as Claude Code
}
"""Results that are references in the last prompt of a session with seven calls."""


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_agent_in_three_turns(session_of: Callable[..., Session], tmp_path: Path, agent: AgentProgram) -> None:
    command = agent.command()
    if command is None:
        pytest.skip(f"{agent.name} is not installed")
    one, other = tmp_path / "work" / "sea.txt", tmp_path / "work" / "land.txt"
    session = session_of(session_script(agent, one, other))
    agent.prepare(session.home)
    for turn, question in enumerate(QUESTIONS):
        assert ANSWER in agent.ask(session.home, command, question, turn > 0)
    session.check(REFERENCES[agent.name])
    page = httpx.get(session.home.base_url.removesuffix("/v1")).text
    assert f"{agent.name} (1)" in page


AGENT = """
import asyncio, sys
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)
@function_tool
def read(path: str) -> str:
    return open(path).read()
kind = OpenAIResponsesModel if sys.argv[3] == "responses" else OpenAIChatCompletionsModel
model = kind(model=sys.argv[2], openai_client=AsyncOpenAI(base_url=sys.argv[1], api_key="x"))
agent = Agent(name="reader", instructions="Be brief.", model=model, tools=[read])
print(asyncio.run(Runner.run(agent, "How deep is the sea?")).final_output)
"""


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(session_of: Callable[..., Session], tmp_path: Path, api: str) -> None:
    """The framework that PageIndex uses."""
    pytest.importorskip("agents")
    call = {"calls": [{"name": "read", "arguments": {"path": str(tmp_path / "work" / "sea.txt")}}]}
    session = session_of([call, call, call, {"text": ANSWER}])
    home = session.home
    assert ANSWER in home.run(sys.executable, "-c", AGENT, home.base_url, home.model, api)
    session.check(references=2)


LITELLM = """
import json, sys, litellm
tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": "How deep is the sea?"}]
while True:
    answer = litellm.completion("openai/" + sys.argv[2], messages, api_base=sys.argv[1], api_key="x", tools=[tool])
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        text = open(json.loads(call.function.arguments)["path"]).read()
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    if not message.tool_calls:
        print(message.content)
        break
"""


def test_litellm(session_of: Callable[..., Session], tmp_path: Path) -> None:
    python = installed("litellm", "bin/python")
    if python is None:
        pytest.skip("LiteLLM is not installed")
    call = {"calls": [{"name": "read", "arguments": {"path": str(tmp_path / "work" / "sea.txt")}}]}
    session = session_of([call, call, call, {"text": ANSWER}])
    assert ANSWER in session.home.run(python, "-c", LITELLM, session.home.base_url, session.home.model)
    session.check(references=2)


PAGEINDEX = """
import sys
from pageindex import PageIndexLocalClient
client = PageIndexLocalClient(model="openai/" + sys.argv[2], storage_path="library")
document = client.submit_document("sea.pdf")["doc_id"]
print(client.chat("How deep is the sea?", doc_id=document))
"""


def test_pageindex(session_of: Callable[..., Session], tmp_path: Path) -> None:
    """It indexes a document, and its agent reads one page three times."""
    python = installed("pageindex", "bin/python")
    if python is None:
        pytest.skip("PageIndex is not installed")
    call = {"calls": [{"name": "get_page_content", "arguments": {"doc_name": "sea.pdf", "pages": "1"}}]}
    session = session_of([call, call, call, {"text": ANSWER}])
    (tmp_path / "work" / "sea.pdf").write_bytes(pdf_of(SEA.splitlines()[:40]))
    variables = {"OPENAI_BASE_URL": session.home.base_url, "OPENAI_API_BASE": session.home.base_url}
    printed = session.home.run(
        python, "-c", PAGEINDEX, session.home.base_url, session.home.model, OPENAI_API_KEY="x", **variables
    )
    assert ANSWER in printed
    session.check(references=2)
    assert "PageIndex (" in httpx.get(session.home.base_url.removesuffix("/v1")).text


def pdf_of(lines: Sequence[str]) -> bytes:
    """Return a document of one page."""
    text = b"BT /F1 11 Tf 14 TL 50 800 Td " + b" ".join(b"(%s) Tj T*" % line.encode() for line in lines) + b" ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R /Resources"
        b" << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(text), text),
    ]
    document, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(document))
        document += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 5\n0000000000 65535 f \n%strailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return document + end % (table, len(document))


MEM0 = """
import sys
from mem0 import Memory
from openai import OpenAI
model, base = sys.argv[2], sys.argv[1]
openai = {"provider": "openai", "config": {"model": model, "openai_base_url": base}}
store = {"provider": "qdrant", "config": {"path": "memories", "on_disk": True}}
memory = Memory.from_config({"llm": openai, "embedder": openai, "vector_store": store})
for text in ("The sea is 3,688 metres deep.", "Ann dives."):
    memory.add(text, user_id="ann")
found = [each["memory"] for each in memory.search("How deep is the sea?", filters={"user_id": "ann"})["results"]]
messages = [{"role": "user", "content": "Memories: " + ", ".join(found) + " How deep?"}]
answer = OpenAI(base_url=base).chat.completions.create(model=model, messages=messages)
print(found, answer.choices[0].message.content)
"""


def test_mem0(session_of: Callable[..., Session], tmp_path: Path) -> None:
    """Its extraction, embeddings and a chat with what it finds go through the gateway."""
    pytest.importorskip("mem0")
    facts = {"memory": [{"id": "0", "text": "The sea is 3,688 metres deep.", "attributed_to": "user"}]}
    extracted = [{"when": words, "text": json.dumps(facts)} for words in ("Memory Extractor", "Information Organizer")]
    session = session_of([*extracted, {"when": "Memories:", "text": ANSWER}])
    printed = session.home.run(
        *(sys.executable, "-c", MEM0, session.home.base_url, session.home.model),
        OPENAI_API_KEY="x",
        MEM0_TELEMETRY="False",
        MEM0_DIR=str(tmp_path / "mem0"),
    )
    assert printed.startswith("['The sea is 3,688 metres deep.'")
    assert ANSWER in printed
    session.check(references=0)
    assert "Mem0 (" in httpx.get(session.home.base_url.removesuffix("/v1")).text
