"""LangGraph: a conditional edge that sends each document to the agent that has read it before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from typing_extensions import TypedDict

from warmprefix import Choice, ContextPlanner, MissingExtraError
from warmprefix.plan import Placement
from warmprefix_chain_of_agents.documents import has_value, value_of
from warmprefix_chain_of_agents.fan_out import FanOut, Share
from warmprefix_requests.neighbours import PinRule
from warmprefix_routing import AgentRouter

try:
    from langchain_core.runnables import RunnableConfig
    from langgraph.types import Send
except ImportError as error:
    raise MissingExtraError("langchain", "langgraph") from error

__all__ = ["AgentDocuments", "GraphFanOut"]


class AgentDocuments(TypedDict):
    """The input of an agent's node, in addition to the keys in `carry`. As plain as the documents: checkpoints keep it.

    Extend it to type your node's input.
    """

    agent: str
    """Name of the agent."""
    documents: list[Any]
    """As they are in the state, in its order. A `ContextBlock` is a mapping here, because checkpoints can't restore it;
    `reading` makes it a block again."""
    assignment: str
    """The id of the assignment."""
    part: int
    """Number of the agent's part in the assignment."""
    conversation: str | None
    """The id of the conversation; None without one."""
    tenant: str | None
    """Name of the tenant; None without one."""


class GraphFanOut(FanOut):
    """A conditional edge: `graph.add_conditional_edges("retrieve", fan_out, fan_out.destinations)`.

    Every document of the state goes to one agent; each agent gets a `Send` with `AgentDocuments`. The node reads them
    inside `with fan_out.planning(payload) as plan:`, or `reading`, so that the router records which agents saw theirs.
    A node that LangGraph retries, resumes or replays counts once; resumed in another process it reads its documents,
    and the router there records nothing.

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
        order_locked: bool = False,
        pinned: PinRule[Any] | None = None,
        choose: Choice | None = None,
        name: str | None = None,
        max_open: int = 10_000,
    ) -> None:
        """Set up the edge.

        Args:
            router: The router of the agents.
            nodes: The one node for all of the router's agents, or each agent's node.
            documents: Key of the state's documents: texts, LangChain's documents, blocks, or nodes.
            carry: Other keys of the state that the agents need, such as the question.
            otherwise: The node to go on with if there are no documents; None to end there.
            tenant: The tenant, or a function of the state and the config that returns it; by default the config's
                `tenant`, in `configurable`. Nothing is shared between tenants.
            placement: `"head"` if the nodes rebuild their prompts each time, `"tail"` if each agent keeps a chat per
                thread.
            together: If True, an agent reads all of its documents in one prompt; if False, each has a `Send`.
            planner: Makes the plans that `planning` yields; one of its own by default.
            order_locked: As for `ChainOfAgents`, like `pinned`.
            pinned: For documents that are no blocks.
            choose: Which of the documents are read, as for `ChainOfAgents`; the others are in no share.
            name: The edge's name: two that start from one node need different ones.
            max_open: Most assignments that wait to be read; beyond it the oldest is withdrawn.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `carry` names a key of `AgentDocuments`, or `placement`, `together` or `max_open` can't be used.
        """
        agents = None if isinstance(nodes, str) else nodes
        super().__init__(router, agents, placement, together, planner, order_locked, pinned, choose, max_open)
        if isinstance(carry, str):
            raise TypeError(f"carry must be keys of the state, got one str, {carry!r}")
        taken = sorted({*carry} & {*AgentDocuments.__annotations__})
        if taken:
            raise ValueError(f"carry must not name keys of AgentDocuments, got {', '.join(taken)}")
        self._nodes = nodes
        self._documents = documents
        self._carry = tuple(carry)
        self._otherwise = otherwise
        self._tenant = tenant
        self.__name__ = f"agents_for_{documents}" if name is None else name
        """Name that distinguishes a node's edges in LangGraph."""

    @property
    def destinations(self) -> list[str]:
        """Nodes that it may lead to, for `add_conditional_edges` to draw."""
        nodes = [self._nodes] if isinstance(self._nodes, str) else self._nodes.values()
        return list(dict.fromkeys(name for name in (*nodes, self._otherwise) if name is not None))

    def __call__(self, state: Any, config: RunnableConfig) -> list[Send | str]:
        """Send the documents of the state to the agents.

        Raises:
            NoAgentError: All agents have failed or left.
            TypeError: The state holds no documents under that key, or another object among them.
        """
        named = config.get("configurable") or {}
        thread = named.get("thread_id")
        conversation = None if thread in (None, "") else str(thread)
        tenant = self._tenant(state, config) if callable(self._tenant) else self._tenant
        if self._tenant is None and named.get("tenant") is not None:
            tenant = str(named["tenant"])
        shares = self._shared_out(value_of(state, self._documents), conversation, tenant)
        if not shares:
            return [] if self._otherwise is None else [self._otherwise]
        # A key that the state lacks is left to the node to miss.
        carried = {key: value_of(state, key) for key in self._carry if has_value(state, key)}
        origin = {"conversation": conversation, "tenant": tenant}
        return [self._send(share, {**carried, **origin}) for share in shares]

    def reassign(self, payload: Any) -> list[Send]:
        """Send an agent's documents to others. Call `router.fail(agent)` first if it can't be reached.

        Read each `send.arg` in the node itself if a later node waits for it; it would not wait for `Command(goto=...)`.

        Raises:
            NoAgentError: There is no other agent.
        """
        return [self._send(share, payload) for share in self._moved(payload)]

    def _send(self, share: Share, rest: Mapping[str, Any]) -> Send:
        node = self._nodes if isinstance(self._nodes, str) else self._nodes[share.agent]
        handed = {"agent": share.agent, "documents": share.documents, "assignment": share.assignment}
        return Send(node, {**rest, **handed, "part": share.part})
