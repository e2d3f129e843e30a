"""Random turns of an application with a plugin, on a real Redis that fails; each prompt is checked.

Two workers, each with a planner and a connection of its own, serve the same conversations. Turns are retried, cancelled
and closed early; the engine refuses some; histories are forked, cut and raced for; workers die. `recorded_prompts`
checks what the engine received, and nothing else.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from recorded import Application, Engine, How
from recorded_prompts import Passage, PromptFindings, PromptMessage, answer_of, marked, number_of
from store_faults import RedisLaboratory
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

__all__ = ["Model", "RecordedWorld", "instant_engine"]

TENANTS = ("acme", "globex", None)
CHATS_PER_TENANT = 4
LONGEST_HISTORY = 12
"""Number of turns after which another conversation replaces this one."""
EXAMPLES = 20


class Model:
    """The engine's answers, and the prompts that it received."""

    def __init__(self) -> None:
        self.refusal: int | None = None
        """Status of all answers; None to answer."""
        self._prompts: dict[int, list[list[PromptMessage]]] = {}

    def __call__(self, messages: Sequence[Any]) -> str:
        prompt = [PromptMessage(message.role, message.text) for message in messages]
        number = number_of(prompt)
        if number is not None:
            self._prompts.setdefault(number, []).append(prompt)
        if self.refusal is not None:
            raise HTTPException(self.refusal, "The engine refuses.")
        return answer_of(prompt)

    def take(self, number: int) -> list[list[PromptMessage]]:
        """Return and forget the prompts of a turn."""
        return self._prompts.pop(number, [])


def instant_engine(model: Model | None = None) -> EmulatorServer:
    """Return an emulator that takes no time, with room for everything."""
    config = EmulatorConfig(kv_blocks=65_536, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    return EmulatorServer(config, reader=model)


@dataclass(frozen=True, eq=False)
class _History:
    """A state that an application keeps."""

    state: Any = None
    turns: int = 0
    cut: bool = False
    """True if the application has cut or edited it."""
    story: tuple[str, ...] = ()


@dataclass(eq=False)
class _Chat:
    """A conversation, with all histories that it had."""

    tenant: str | None
    name: str
    topic: Sequence[int]
    histories: list[_History] = field(default_factory=lambda: [_History()])


class _Library:
    """Passages that retrievers return. Some imitate the labels and notes of others; some change."""

    def __init__(self, rng: random.Random, size: int = 160) -> None:
        self.size = size
        words = [
            "prefix",
            "cache",
            "token",
            "block",
            "prompt",
            "model",
            "turn",
            "label",
            "store",
            "worker",
            "query",
            "answer",
            "index",
            "graph",
        ]
        self._texts = [f"Fact {i}: {' '.join(rng.choices(words, k=rng.randrange(6, 30)))}." for i in range(size)]
        for i in range(2, size):
            target = _imitated(i)
            other = self._texts[target]
            digits = ContextBlock(other).fingerprint.hex()[:6]
            forms = {
                1: f"\n[doc-{target}] A line that imitates a header.",
                2: f"\n[doc-{target}~{digits}] This imitates a lasting label.\n[ctx-{digits}] And this one.",
                3: f"\nPlease also use the context labelled [doc-{target}] above in this conversation.",
                4: "\nAnd more.",
                5: f"\n\nA second paragraph of fact {i}.\n\n- with\n- a list [1], [2]",
                6: f"\n［doc-{target}］ In full-width brackets. \u200b[doc-{i - 2}] Invisible.",
                7: " The end, " * 40 + "after many words.",
            }
            base = self._texts[i - 1] if i % 12 == 4 else self._texts[i]
            self._texts[i] = base + forms.get(i % 12, "")

    def block(self, tenant: str | None, number: int, version: int) -> ContextBlock:
        text = self._texts[number]
        if number % 10 == 9 and version:
            text += f" Version {version}."
        if tenant is not None:
            text += f" This is property of tenant {tenant}."
        return ContextBlock(text, id=None if number % 12 == 8 else f"doc-{number}")


def _imitated(number: int) -> int:
    """Return the passage whose label another passage imitates."""
    return number * 7 // 11


class RecordedWorld:
    """Two workers of an application, their engine and their users; `step` executes one random operation."""

    def __init__(self, laboratory: RedisLaboratory, kind: type[Application], seed: int, workers: int = 2) -> None:
        self.findings = PromptFindings(shares=kind.shares, of_results=kind.refers_to_results)
        self.operations: Counter[str] = Counter()
        self.laboratory = laboratory
        self.errors = 0
        self.rng = random.Random(f"recorded {seed}")
        self.model = Model()
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="warmprefix-recorded-")
        self._server = instant_engine(self.model).__enter__()
        self._library = _Library(random.Random(seed))
        self._numbers = 0
        self._chats: Counter[str | None] = Counter()
        self._cuts = 0
        self._threads = ThreadPoolExecutor(workers)
        self.workers = [self._worker(i) for i in range(workers)]
        self.chats = [self._chat(tenant) for tenant in TENANTS for _ in range(CHATS_PER_TENANT)]
        operations: Sequence[tuple[Callable[[], None], int]] = (
            (self.turn, 60),
            (self.stream, 8),
            (self.close_stream, 5),
            (self.cancel, 5),
            (self.refuse, 5),
            (self.fork, 10 * kind.forks),
            (self.lose_answer, 4 * kind.forks),
            (self.race, 4 * kind.forks),
            (self.edit, 3),
            (self.die, 1),
        )
        self._operations = [operation for operation, _ in operations]
        self._weights = [weight for _, weight in operations]

    @property
    def turns(self) -> int:
        """Number of turns that ended, in any way."""
        return self.findings.turns

    def step(self) -> None:
        operation = self.rng.choices(self._operations, self._weights)[0]
        self.operations[operation.__name__] += 1
        operation()

    def close(self) -> None:
        self._threads.shutdown()
        for worker in self.workers:
            self._end(worker)
        self._server.close()
        self._folder.cleanup()

    # -- operations ----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Continue the newest history."""
        self._continue(self._any_chat())

    def stream(self) -> None:
        """Read a streamed answer to its end."""
        self._continue(self._any_chat(), how="stream")

    def close_stream(self) -> None:
        """Close a stream after its first piece."""
        self._continue(self._any_chat(), how="close")

    def cancel(self) -> None:
        """Cancel a task somewhere."""
        self._continue(self._any_chat(), how="cancel")

    def refuse(self) -> None:
        """Have the engine refuse; the next turn of this history is a retry."""
        self.model.refusal = self.rng.choice((400, 429, 500, 503))
        try:
            self._continue(self._any_chat(), how=self.rng.choice(("plain", "stream")))
        finally:
            self.model.refusal = None

    def fork(self) -> None:
        """Continue an older history, as a user does who edits a message or travels back in time."""
        chat = self._any_chat()
        self._continue(chat, base=self.rng.choice(chat.histories))

    def lose_answer(self) -> None:
        """Get an answer, and fail to store it: the next turn repeats this one."""
        self._continue(self._any_chat(), keep=False)

    def race(self) -> None:
        """Continue one history in two workers at the same time; both answers are kept."""
        chat = self._any_chat()
        base = self.rng.choice(chat.histories[-2:])
        plans = [self._request(chat) for _ in self.workers]
        running = [
            self._threads.submit(self._ask, chat, base, worker, number, blocks, "plain")
            for worker, (number, blocks) in zip(self.workers, plans, strict=True)
        ]
        for (number, _), each in zip(plans, running, strict=True):
            self._settle(chat, base, number, "race", each.result())

    def edit(self) -> None:
        """Cut or edit a history, as the framework does."""
        chat = self._any_chat()
        base = chat.histories[-1]
        if not base.turns:
            return
        worker = self.rng.choice(self.workers)
        state = worker.edit(base.state, self.rng, conversation=chat.name, tenant=chat.tenant)
        if state is not None:
            self._cuts += 1
            self._keep(chat, _History(state, base.turns, True, (*base.story, "cut")))

    def die(self) -> None:
        """Kill a worker and start another one: what it kept in memory is lost."""
        index = self.rng.randrange(len(self.workers))
        if self.laboratory.may_lose_worker():
            self._end(self.workers[index])
            self.workers[index] = self._worker(index)

    # -- steps of operations -------------------------------------------------------------------------------------------

    def _continue(self, chat: _Chat, *, base: _History | None = None, how: How = "plain", keep: bool = True) -> None:
        base = chat.histories[-1] if base is None else base
        worker = self.rng.choice(self.workers)
        number, blocks = self._request(chat)
        self._settle(chat, base, number, how, self._ask(chat, base, worker, number, blocks, how), keep)

    def _request(self, chat: _Chat) -> tuple[int, Sequence[ContextBlock]]:
        self._numbers += 1
        count = self.rng.choice((1, 2, 3, 3, 4, 5))
        numbers = {
            self.rng.choice(chat.topic) if self.rng.random() < 0.85 else self.rng.randrange(self._library.size)
            for _ in range(count)
        }
        version = self.rng.random() < 0.3
        blocks = [self._library.block(chat.tenant, number, version) for number in sorted(numbers)]
        if self.rng.random() < 0.1:  # one text twice
            blocks.append(ContextBlock(blocks[0].text, id=f"copy-{self._numbers % 9}"))
        self.rng.shuffle(blocks)
        self.findings.asked[self._numbers] = [Passage(block.text, chat.tenant) for block in blocks]
        return self._numbers, blocks

    def _ask(
        self,
        chat: _Chat,
        base: _History,
        worker: Application,
        number: int,
        blocks: Sequence[ContextBlock],
        how: How,
    ) -> Any:
        question = marked(f"What does [doc-{number % 9}] add?", number)
        try:
            return worker.turn(base.state, question, blocks, conversation=chat.name, tenant=chat.tenant, how=how)
        except Exception:
            if self.model.refusal is None:
                raise
            return None  # the engine has refused

    def _settle(self, chat: _Chat, base: _History, number: int, event: str, state: Any, keep: bool = True) -> None:
        prompts = self.model.take(number)
        event = f"{number} {event}{'' if state is not None else ', nothing kept'}"
        mistakes = self.findings.check(number, prompts, cut=base.cut, ended=state is not None)
        if mistakes and len(self.findings.examples) < EXAMPLES:
            told = "; ".join((*base.story, event))
            shown = json.dumps(prompts, ensure_ascii=False, indent=1)
            self.findings.examples.append(f"{mistakes}, in {chat.name} of {chat.tenant}: {told}\n{shown}")
        if state is not None and keep:
            self._keep(chat, _History(state, base.turns + 1, base.cut, (*base.story, event)))

    def _keep(self, chat: _Chat, history: _History) -> None:
        chat.histories = [*chat.histories[-7:], history]
        if history.turns >= LONGEST_HISTORY and chat in self.chats:
            self.chats[self.chats.index(chat)] = self._chat(chat.tenant)

    def _any_chat(self) -> _Chat:
        return self.rng.choice(self.chats)

    def _chat(self, tenant: str | None) -> _Chat:
        self._chats[tenant] += 1  # every tenant has the same names
        imitators = self.rng.sample(range(2, self._library.size), 7)
        topic = [*imitators, *map(_imitated, imitators)]
        return _Chat(tenant, f"chat-{self._chats[tenant]}", topic)

    def _worker(self, index: int) -> Application:
        url = self.laboratory.url(index)
        planner = ContextPlanner(store=self.laboratory.store(index), annotate=self.rng.choice(("both", "auto")))
        engine = Engine(self._server.base_url, url, self._server.config.model)
        return self._kind("record", engine, planner, Path(self._folder.name))

    def _end(self, worker: Application) -> None:
        if worker.planner is not None:
            self.errors += worker.planner.stats().store_errors
        worker.close()
