"""The fleet behind a router: members, their feeds, and the tenants' states."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Generic

from warmprefix.errors import check_names, log_failure
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency import EngineReport, FoundCheckpoints, ResidencyFeed, ServedPrompt
from warmprefix_routing.members import Agent, Member, check_type
from warmprefix_routing.tenants import StateT, Tenants

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Fleet", "check_request", "listed"]

_log = logging.getLogger("warmprefix")


class Fleet(ABC, Generic[StateT]):
    """A router without the choice: the members, and what it keeps per tenant. Thread-safe."""

    _kind: ClassVar[str]
    """What messages call a member."""
    _spec: ClassVar[type[Agent]]
    """The class that describes a member."""
    _closes_feeds: ClassVar[bool]
    """True if a feed belongs to the member that it joined with."""

    def __init__(self, members: Iterable[Agent | str], max_tenants: int, max_bytes: int) -> None:
        if isinstance(members, str | bytes):
            allowed = f"an iterable of {self._spec.__name__} or str"
            raise TypeError(f"{self._kind}s must be {allowed}, got one {type(members).__name__}")
        self._members: dict[str, Member] = {}
        self._failed: dict[str, Member] = {}
        self._feeds: list[ResidencyFeed] = []
        """The feeds to close."""
        self._tenants = Tenants(max_tenants, max_bytes, self._new_tenant, self._tenant_forgotten)
        self._counts: Counter[str] = Counter()
        self._failures = 0
        # Guards all of the above. Re-entrant, because the garbage collector may abandon a route during any other call.
        self._lock = fork_safe_lock(self._forget_tenants)
        in_each_process(self._set_up_process)
        for member in members:
            self.join(member)

    def _set_up_process(self) -> None:
        self._release_open()
        self._instance = uuid.uuid4().hex
        self._number = 0

    def join(self, member: Agent | str, feed: ResidencyFeed | None = None) -> None:
        """Add a member, or bring back one that failed. It starts with the others' mean load, and holds nothing.

        Args:
            member: An agent or replica, or its name. The name of one that failed brings it back as it was.
            feed: Reports what the member's engine holds, and only that engine's. A member that failed keeps its feed
                unless it joins with another. The feed needs each prompt's tokens: `commit` plans, with reports that
                have `prompt_token_ids`. A `ReplicaRouter` closes the feed when the replica leaves, or with the router;
                an `AgentRouter` leaves that to the caller.

        Raises:
            TypeError: An argument has another type.
            ValueError: The name is empty, or a member has this name.
        """
        if not isinstance(member, self._spec | str):
            expected = f"{'an' if self._kind[0] in 'aeiou' else 'a'} {self._spec.__name__} or its name"
            raise TypeError(f"{self._kind} must be {expected}, got {type(member).__name__}")
        check_type("feed", feed, ResidencyFeed, optional=True)
        spec = self._spec(member) if isinstance(member, str) else member
        with self._lock:
            if spec.name in self._members:
                raise ValueError(f"{self._kind}s must have different names, got {spec.name!r} twice")
            before = self._failed.pop(spec.name, None)
            if before is not None:
                spec = before.spec if isinstance(member, str) else spec
                feed = before.feed if feed is None else feed
            joined = self._members[spec.name] = Member(spec, feed, self._apply_residency)
            if before is not None and before.feed is feed:
                joined.first_blocks = before.first_blocks
            self._joined(joined)
            for state in self._tenants.states.values():
                state.join(joined)
            self._tenants.record_all()
            if feed is not None and self._closes_feeds and feed not in self._feeds:
                self._feeds.append(feed)
        if before is not None and before.feed is not feed:
            self._close_feed(before)
        if feed is not None:
            with self._tolerate_failure(joined):
                feed.follow(joined)

    def leave(self, name: str) -> None:
        """Remove a member for good. Its blocks and conversations go to others from now on.

        Raises:
            ValueError: No member has this name.
        """
        with self._lock:
            gone = self._failed.pop(name, None) or self._remove(name)
        self._close_feed(gone)

    def fail(self, name: str) -> None:
        """Stop using a member until it joins again, by its name; forget what it holds and what is open there.

        Idempotent, so that several callers can report one failure.

        Raises:
            ValueError: No member has this name.
        """
        with self._lock:
            if name not in self._failed:
                self._failed[name] = self._remove(name)
                self._failures += 1

    def _remove(self, name: str) -> Member:
        member = self._member(name)
        del self._members[name]
        member.alive = False
        for state in self._tenants.states.values():
            state.leave(member)
        self._removed(member)
        self._tenants.record_all()
        return member

    def _member(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None:
            raise ValueError(f"{self._kind} must be one of {listed(self._members)}, got {name!r}")
        return member

    def _available(self, names: Iterable[str]) -> list[str]:
        """Check the names of members to choose from, and return those that have not failed."""
        if isinstance(names, str):
            raise TypeError(f"{self._kind}s must be an iterable of names, got one str")
        named = list(names)
        if not named:
            raise ValueError(f"{self._kind}s must have one name or more, got none")
        for name, times in Counter(named).items():
            if times > 1:
                raise ValueError(f"{self._kind}s must be different, got {name!r} twice")
            if name not in self._members and name not in self._failed:
                registered = listed([*self._members, *self._failed])
                raise ValueError(f"{self._kind}s must be registered, got {name!r}; registered: {registered}")
        return [name for name in named if name in self._members]

    def reset(self) -> None:
        """Forget everything except the members: loads, residency, conversations, open requests, counts."""
        with self._lock:
            self._forget_tenants()
            self._counts.clear()
            self._failures = 0

    def close(self) -> None:
        """Close what belongs to the router: feeds, or sharing with other processes. Idempotent."""
        with self._lock:
            members = [*self._members.values(), *self._failed.values()]
        for member in members:
            self._close_feed(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- hooks; the lock is held -------------------------------------------------------------------------------

    @abstractmethod
    def _new_tenant(self, tenant: str | None) -> StateT:
        """Return the state of a new tenant."""

    def _tenant_forgotten(self, tenant: str | None, state: StateT) -> None:
        """Release what a forgotten tenant used elsewhere."""

    def _forget_tenants(self) -> None:
        self._tenants.clear()

    def _release_open(self) -> None:
        """Release open requests in a forked process, because their end is the parent's to report."""

    def _joined(self, member: Member) -> None:
        """Add a member to what all tenants share."""

    def _removed(self, member: Member) -> None:
        """Remove a member from what all tenants share."""

    @abstractmethod
    def _apply_residency(
        self,
        member: Member,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None,
    ) -> None:
        """Apply a feed's report. Called without the lock, from the feed's thread."""

    def _feed_is_current(self, member: Member | None, plan: ContextPlan | None, report: EngineReport | None) -> bool:
        """Return whether the member's feed makes a report superfluous.

        Must be called without the lock, because the feed's thread takes it.
        """
        if member is None or member.feed is None or plan is None or report is None or report.prompt_token_ids is None:
            return False
        with self._tolerate_failure(member):
            return member.feed.is_complete(plan.cache_salt)
        return False

    def _remember_prompt(self, member: Member | None, plan: ContextPlan | None, report: EngineReport | None) -> bool:
        """Let the member's feed find the plan's blocks among the engine's KV blocks. False if there is no such feed."""
        if member is None or member.feed is None or plan is None or report is None or report.prompt_token_ids is None:
            return False
        if not plan.opens_prompt or not plan.blocks:
            return True
        keys = tuple([planned.block.fingerprint for planned in plan.blocks])
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        prompt = ServedPrompt(plan.scope, plan.cache_salt, keys, paragraphs, report.prompt_token_ids)
        with self._tolerate_failure(member):
            member.feed.remember(prompt)
            return True
        return False

    def _close_feed(self, member: Member) -> None:
        with self._lock:
            if member.feed is None or member.feed not in self._feeds:
                return
            self._feeds.remove(member.feed)
        with self._tolerate_failure(member):
            member.feed.close()

    @contextmanager
    def _tolerate_failure(self, member: Member) -> Iterator[None]:
        """Count and log the failure of a feed: the only place where a feed degrades to none."""
        try:
            yield
        except Exception:
            with self._lock:
                self._counts["feed_errors"] += 1
                first = self._counts["feed_errors"] == 1
            log_failure(_log, f"feed of {self._kind} {member.name!r} failed", first=first)


def check_request(conversation: str | None, **names: str | None) -> None:
    """Check the arguments of a request that are names."""
    check_names(conversation=conversation, **names)
    if conversation == "":
        raise ValueError("conversation must not be empty, got ''; None stands for no conversation")


def listed(names: Iterable[str]) -> str:
    """Return names for a message."""
    return ", ".join(map(repr, names)) or "none"
