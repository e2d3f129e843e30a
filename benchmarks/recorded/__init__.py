"""Applications of `recorded_conversations`: one module per plugin, with the real framework.

Each is one worker of an application whose users talk to a model in turns. The same turns run with the history shown to
the planner, with the record alone, and without warmprefix.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from warmprefix import ContextBlock, ContextPlanner

__all__ = ["APPLICATIONS", "INSTRUCTIONS", "Application", "Arm", "Engine", "How", "application_named", "is_installed"]

T = TypeVar("T")

INSTRUCTIONS = "Answer from the context, and point out if the answer is not in it."

Arm = Literal["shown", "record", "without"]
"""`"shown"`: the planner sees the messages of the history. `"record"`: it does not. `"without"`: no planner."""

How = Literal["plain", "stream", "close", "cancel"]
"""A call, a stream that is read to its end, a stream that is closed after its first piece, and a cancelled task."""

APPLICATIONS: Mapping[str, str] = {
    "gateway": "recorded.gateway:GatewayApplication",
    "planner-branch": "recorded.planner:BranchApplication",
    "planner-name": "recorded.planner:NameApplication",
    "llamaindex-workflow": "recorded.llamaindex:WorkflowApplication",
    "llamaindex-chat": "recorded.llamaindex:ChatEngineApplication",
    "responses": "recorded.responses:ResponsesApplication",
    "mem0-branch": "recorded.mem0:BranchApplication",
    "mem0-name": "recorded.mem0:NameApplication",
    "langchain-branch": "recorded.langchain_chats:BranchChain",
    "langchain-thread": "recorded.langchain_chats:ThreadChain",
    "langchain-responses": "recorded.langchain_chats:ResponseChain",
    "langgraph": "recorded.langchain_chats:GraphApplication",
    "langgraph-branch": "recorded.langchain_chats:BranchGraph",
    "agents": "recorded.agents:AgentsApplication",
}
"""Module and class of each application."""


@dataclass(frozen=True)
class Engine:
    """The engine of an application, and the Redis that its workers share."""

    base_url: str
    redis_url: str
    model: str = "warmprefix-emulator"


class Application:
    """One worker of an application.

    Args:
        arm: What the planner sees of the history.
        engine: Its engine, and the URL of Redis for plugins that take a URL.
        planner: A planner on that Redis; None without warmprefix.
        folder: A folder that all workers of the application share, for its own database.
    """

    needs: ClassVar[Sequence[str]] = ()
    """Modules of the framework."""
    arms: ClassVar[Sequence[Arm]] = ("shown", "record", "without")
    """The arms that the framework allows."""
    forks: ClassVar[bool] = True
    """True if a state is one exact history: an older one can be continued."""
    shares: ClassVar[bool] = False
    """True if a turn may have several prompts, each with a share of the passages."""
    refers_to_results: ClassVar[bool] = False
    """True if references name results of tools, and not blocks of context."""

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        self.arm = arm
        self.engine = engine
        self.planner = planner
        self.folder = folder
        self.rng = random.Random(0)
        """Decides when a task is cancelled."""
        self._loop = asyncio.new_event_loop()

    def turn(
        self,
        state: Any,
        question: str,
        passages: Sequence[ContextBlock],
        *,
        conversation: str,
        tenant: str | None,
        how: How,
    ) -> Any:
        """Ask the model with these passages; return the new state, or None if the application keeps nothing.

        An error of the engine leaves this method.

        Args:
            state: What the application keeps of the history, in the form of JSON; None at the beginning. It never
                changes.
            question: The question, which must stand in the prompt with the passages.
            passages: What the retriever returned, best first.
            conversation: Name of the conversation.
            tenant: Owner of the request.
            how: How the application calls its framework.
        """
        raise NotImplementedError

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Cut or edit the history as the framework does; None if it has no way, or this did not work."""
        return None

    def close(self) -> None:
        """End the worker."""
        if self.planner is not None:
            self.run(self.planner.__aexit__())
        self.run(asyncio.sleep(0))
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await this on the worker's own event loop."""
        return self._loop.run_until_complete(work)

    def cancelled(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run a task, and cancel it after some milliseconds, wherever it is then; None if it was cancelled."""

        async def cancelling() -> T | None:
            task = asyncio.ensure_future(work)
            await asyncio.wait([task], timeout=self.rng.choice((0.0, 0.0005, 0.001, 0.002, 0.004, 0.008)))
            task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                return None

        return self.run(cancelling())


def application_named(name: str) -> type[Application]:
    """Return the class of an application."""
    module, _, name = APPLICATIONS[name].partition(":")
    return cast(type[Application], getattr(import_module(module), name))


def is_installed(name: str) -> bool:
    """Return True if the framework of an application can be imported."""
    module = APPLICATIONS[name].partition(":")[0]
    try:
        needs = application_named(name).needs
    except ImportError as error:
        if str(error.name).startswith(("warmprefix", module)):
            raise
        return False
    return all(find_spec(need) is not None for need in needs)
