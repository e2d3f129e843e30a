"""LangGraph: a conditional edge that sends each document to the agent that already knows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from typing_extensions import TypedDict

from warmprefix import AgentRouter, ContextPlanner, MissingExtraError, Placement
from warmprefix_chain_of_agents.documents import has_value, value_of
from warmprefix_chain_of_agents.fan_out import FanOut, Share

try:
    from langchain_core.runnables import RunnableConfig
    from langgraph.types import Send
except ImportError as error:
    raise MissingExtraError("langchain", "langgraph") from error

__all__ = ["AgentDocuments", "AgentFanOut"]


class AgentDocuments(TypedDict):
    """What an agent's node is sent, beside what `carry` names. Plain, as far as the documents are: checkpoints keep it.

    Extend it to type your node's input.
    """

    agent: str
    documents: list[Any]
    """As they stand in the state, and in its order. A `ContextBlock` is a mapping here, for no checkpoint gives it
    back; `reading` makes it one again."""
    assignment: str
    part: int
    conversation: str | None
    tenant: str | None


class AgentFanOut(FanOut):
    """A conditional edge: `graph.add_conditional_edges("retrieve", fan_out, fan_out.destinations)`.

    Every document of the state goes to one agent: a `Send` each, with `AgentDocuments`. The node then reads them
    inside `with fan_out.planning(payload) as plan:`, or `reading`, so that the router learns which agents saw theirs.
    A node that LangGraph retries, resumes or replays counts once; resumed in another process it reads its documents,
    and the router there learns nothing of it.

    In a node, `Command(goto=fan_out(state, config))` does the same. The conversation is the config's `thread_id`.
    """

    def __init__(
        self,
        router: AgentRouter,
        nodes: str | Mapping[str, str],
        *,
        documents: str = "documents",
        carry: Collection[str] = (),
        otherwise: str | None = None,
        tenant: str | Callable[[Any, RunnableConfig], str | None] | None = None,
        placement: Placement = "head",
        together: bool = True,
        planner: ContextPlanner | None = None,
        name: str | None = None,
        max_open: int = 10_000,
    ) -> None:
        """Say who reads what of the state.

        Args:
            router: Knows the agents.
            nodes: The one node for all of the router's agents, or each agent's node.
            documents: Where the state has the documents: texts, LangChain's documents, blocks, or nodes.
            carry: What else of the state the agents need, such as the question.
            otherwise: The node to go on with if there are no documents; None to end there.
            tenant: Whose request, or what tells it from the state and the config; by default the config's `tenant`, in
                `configurable`. Nothing is shared between tenants.
            placement: `"head"` if the nodes make their prompts anew each time, `"tail"` if each agent keeps a chat with
                all that it was told in a thread.
            together: Whether an agent reads all of its documents in one prompt; otherwise each has a `Send` of its own.
            planner: Plans what `planning` yields; one of its own by default.
            name: Of the edge: two that start from one node need different ones.
            max_open: Most assignments that wait to be read; beyond it the oldest is taken back.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `carry` names what is sent anyway, or `placement`, `together` or `max_open` can't be used.
        """
        agents = None if isinstance(nodes, str) else nodes
        super().__init__(router, agents, placement, together, planner, max_open)
        if isinstance(carry, str):
            raise TypeError(f"carry must be several keys of the state, got one str, {carry!r}")
        taken = sorted({*carry} & {*AgentDocuments.__annotations__})
        if taken:
            raise ValueError(f"carry must not name what is sent anyway, got {', '.join(taken)}")
        self._nodes = nodes
        self._documents = documents
        self._carry = tuple(carry)
        self._otherwise = otherwise
        self._tenant = tenant
        self.__name__ = f"agents_for_{documents}" if name is None else name
        """By which LangGraph tells a node's edges apart."""

    @property
    def destinations(self) -> list[str]:
        """The nodes it may lead to, for `add_conditional_edges` to draw."""
        nodes = [self._nodes] if isinstance(self._nodes, str) else self._nodes.values()
        return list(dict.fromkeys([*nodes, *([] if self._otherwise is None else [self._otherwise])]))

    def __call__(self, state: Any, config: RunnableConfig) -> list[Send | str]:
        """The documents of the state, sent to the agents.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: The state holds no documents under that name, or something that is none.
        """
        named = config.get("configurable") or {}
        thread = named.get("thread_id")
        conversation = None if thread in (None, "") else str(thread)
        tenant = self._tenant_of(state, config)
        shares = self._shared_out(value_of(state, self._documents), conversation, tenant)
        if not shares:
            return [] if self._otherwise is None else [self._otherwise]
        # What the state lacks, the node will miss by itself.
        carried = {key: value_of(state, key) for key in self._carry if has_value(state, key)}
        origin = {"conversation": conversation, "tenant": tenant}
        return [self._send(share, {**carried, **origin}) for share in shares]

    def reassign(self, payload: Any) -> list[Send]:
        """What this agent could not read, for the others. Say `router.fail(agent)` first if it can't be reached.

        A node that reads each `send.arg` itself lets a node behind it wait for them; `Command(goto=...)` would not.

        Raises:
            NoAgentError: There is no other agent.
        """
        return [self._send(share, payload) for share in self._moved(payload)]

    def _send(self, share: Share, rest: Mapping[str, Any]) -> Send:
        node = self._nodes if isinstance(self._nodes, str) else self._nodes[share.agent]
        handed = {"agent": share.agent, "documents": share.documents, "assignment": share.assignment}
        return Send(node, {**rest, **handed, "part": share.part})

    def _tenant_of(self, state: Any, config: RunnableConfig) -> str | None:
        if self._tenant is None:
            tenant = (config.get("configurable") or {}).get("tenant")
            return None if tenant is None else str(tenant)
        return self._tenant(state, config) if callable(self._tenant) else self._tenant
