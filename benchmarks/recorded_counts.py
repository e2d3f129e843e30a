"""Tokens that the engine computes for long conversations that two processes serve alternately."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recorded import Arm, Engine, application_named
from recorded_prompts import Passage, PromptFindings, PromptMessage, marked, without_labels
from recorded_traces import AskedTurn, Talk
from recorded_turns import Model, instant_engine
from redis_servers import Server
from warmprefix import ContextPlanner
from warmprefix_redis import SharedSettings
from warmprefix_tools.emulator.tokenizer import encode

__all__ = ["count_tokens"]

WORKERS = 2
BUDGET_SECONDS = 10.0
"""Time that a call of Redis may take: a busy machine must not change the counts."""


def count_tokens(name: str, talks: Sequence[Talk]) -> dict[str, Any]:
    """Serve the talks in each arm; return what the engine computed, and the mistakes in its prompts."""
    row: dict[str, Any] = {"application": name, "talks": len(talks), "turns": sum(map(len, talks))}
    for arm in application_named(name).arms:
        kind = application_named(name)
        findings = PromptFindings(shares=kind.shares, of_results=kind.refers_to_results)
        row[arm] = _serve(name, arm, talks, findings)
        row[f"{arm}_references"] = findings.references
        row["wrong"] = row.get("wrong", 0) + findings.wrong
        for example in findings.examples:
            print(f"{arm}: {example}")
    return row


def _serve(name: str, arm: Arm, talks: Sequence[Talk], findings: PromptFindings) -> dict[str, int]:
    model = Model()
    with ExitStack() as opened:
        redis = opened.enter_context(Server())
        server = opened.enter_context(instant_engine(model))
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="warmprefix-recorded-"))
        engine = Engine(server.base_url, redis.url, server.config.model)
        workers = [opened.enter_context(_WorkerProcess(name, arm, engine, Path(folder))) for _ in range(WORKERS)]
        states: list[Any] = [None] * len(talks)
        number = labels = 0
        for turn in range(max(map(len, talks))):
            for place, talk in enumerate(talks):
                if turn < len(talk):
                    number += 1
                    asked = talk[turn]._replace(question=marked(talk[turn].question, number))
                    findings.asked[number] = [Passage(passage.text) for passage in asked.passages]
                    states[place] = workers[turn % WORKERS].turn(states[place], f"talk-{place}", asked)
                    prompts = model.take(number)
                    labels += sum(map(_label_tokens, prompts))
                    mistakes = findings.check(number, prompts)
                    findings.examples += mistakes
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            metrics: str = answer.read().decode()
    prompt, cached = (_counter(metrics, f"vllm:prefix_cache_{kind}_total") for kind in ("queries", "hits"))
    computed = round(prompt - cached)
    return {"computed": computed, "net_of_labels": computed - labels, "prompt": round(prompt)}


def _label_tokens(prompt: Sequence[PromptMessage]) -> int:
    """Return the tokens of the labels behind the last answer, which no cache has."""
    answers = [place for place, message in enumerate(prompt) if message.role == "assistant"]
    texts = [message.text for message in prompt[answers[-1] + 1 if answers else 0 :]]
    return sum(len(encode(text)) - len(encode(without_labels(text))) for text in texts)


def _counter(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", metrics, re.MULTILINE))


class _WorkerProcess:
    """A process with one worker of an application."""

    def __init__(self, name: str, arm: Arm, engine: Engine, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")  # it imports the framework once
        context.set_forkserver_preload([__name__, application_named(name).__module__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, name, arm, engine, folder))
        self._process.start()
        theirs.close()

    def turn(self, state: Any, conversation: str, asked: AskedTurn) -> Any:
        self._pipe.send((state, conversation, asked))
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> _WorkerProcess:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pipe.close()
        self._process.join()


def _work(pipe: Connection, name: str, arm: Arm, engine: Engine, folder: Path) -> None:
    settings = SharedSettings(redis_url=engine.redis_url, store_budget=BUDGET_SECONDS)
    planner = None if arm == "without" else ContextPlanner.from_url(settings=settings)
    application = application_named(name)(arm, engine, planner, folder)
    while True:
        try:
            state, conversation, asked = pipe.recv()
        except EOFError:
            break
        try:
            given: Mapping[str, Any] = {"conversation": conversation, "tenant": None, "how": "plain"}
            pipe.send(application.turn(state, asked.question, asked.passages, **given))
        except Exception as error:
            pipe.send(RuntimeError(repr(error)))
    application.close()
