"""What the doctor found out about a log."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Divergence", "Finding", "Place", "Report", "Skipped"]


@dataclass(frozen=True, slots=True)
class Place:
    """A spot in one request of the log."""

    request: int
    """Counts the readable requests of the log from 1."""
    file: str
    line: int
    """Of the file, from 1; where the record begins."""
    message: int | None = None
    """Index into `messages`; None outside of them."""
    role: str | None = None
    """Of that message; None outside of them."""
    offset: int | None = None
    """Character in that message's text, or in the prompt; None for a field."""
    path: str | None = None
    """Of the field, such as `tools[2].function.name` or `cache_salt`; None within a text."""
    snippet: str = ""
    """What stands around the spot: one line, or a few, of at most some 200 characters."""
    mark: tuple[int, int] | None = None
    """The part of `snippet` that differs, as a slice; None if there is no telling it from the rest."""

    @property
    def where(self) -> str:
        """The spot within the request, in words.

        >>> Place(7, "log.jsonl", 7, message=0, role="system", offset=31).where
        'messages[0] (system), character 31'
        """
        at = "" if self.offset is None else f"character {self.offset}"
        inside = self.path or ("" if self.message is None else f"messages[{self.message}] ({self.role})")
        return ", ".join(filter(None, (inside, at))) or "prompt"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two requests that could have shared more, and where they part."""

    earlier: Place
    later: Place
    shared_tokens: int
    """What the two prompts have in common at their start, as the log stands."""
    could_share_tokens: int
    """The same if the finding's cause, and all others that were found, were mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of misses."""

    kind: str
    """A stable name, such as `timestamp`; `docs/doctor.md` has a section for each."""
    title: str
    """One line, without a full stop."""
    fix: str
    """What to do, in a sentence or two."""
    lost_tokens: int
    """Prompt tokens that are computed anew because of it; 0 for a finding that is not about speed."""
    share: float
    """`lost_tokens` by all prompt tokens of the log, 0 to 1."""
    requests: int
    """How many requests would hit more, or, if no tokens are lost, are concerned."""
    divergence: Divergence | None
    """An instance; None if there is no pair to show."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that could not be read."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """One log. Tokens are those of the emulator's tokenizer, over all requests."""

    files: tuple[str, ...]
    requests: int
    conversations: int
    """Of more than one request, by their ids, or else by requests that carry on an earlier one."""
    prompt_tokens: int
    hit_tokens: int
    """What a cache would find as the log stands."""
    mended_hit_tokens: int
    """What it would find with all findings mended: `hit_tokens` and what they lose."""
    bound_tokens: int
    """What no order of the same texts could exceed: all that an earlier request held, wherever it stood."""
    kv_block_size: int
    capacity_tokens: int | None
    """Of the cache; None for no bound."""
    findings: tuple[Finding, ...]
    """Worst first."""
    skipped: tuple[Skipped, ...] = ()
    """At most some hundred, in order."""
    skipped_lines: int = 0
    """How many there are."""
    notes: tuple[str, ...] = ()
    """What to know about the log itself, such as that its prompts were cut off when they were logged."""
    reported_prompt_tokens: int | None = None
    """What the engine counted, in those requests whose record has its usage with cached tokens; None without any."""
    reported_cached_tokens: int | None = None
    """The engine's own account of its hits in the same requests."""

    @property
    def lost_tokens(self) -> int:
        """What mending all would save."""
        return self.mended_hit_tokens - self.hit_tokens

    @property
    def lost_share(self) -> float:
        """`lost_tokens` by all prompt tokens; 0 of nothing. What `--fail-above` compares."""
        return self.lost_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hit_ratio(self) -> float:
        """Hits by all prompt tokens; 0 of nothing."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mended_hit_ratio(self) -> float:
        """The same with all findings mended."""
        return self.mended_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def bound_ratio(self) -> float:
        """The most that it could be."""
        return self.bound_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
