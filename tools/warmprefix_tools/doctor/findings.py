"""Results of the doctor for one log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from warmprefix import __version__
from warmprefix_tools.report.amounts import counted, percent

__all__ = ["Divergence", "DoctorReport", "Finding", "Place", "ProfileReport", "SkippedRecord"]


@dataclass(frozen=True, slots=True)
class Place:
    """A spot in one request of the log."""

    request: int
    """Number among the readable requests of the log, from 1."""
    file: str
    line: int
    """Line of the file where the record begins, from 1."""
    message: int | None = None
    """Index into `messages`; None outside of them."""
    role: str | None = None
    """Role of that message; None outside of them."""
    offset: int | None = None
    """Character in that message's text, or in the prompt; None for a field."""
    path: str | None = None
    """Path of the field, such as `tools[2].function.name` or `cache_salt`; None within a text."""
    snippet: str = ""
    """Text around the spot: one line, or a few, of about 200 characters at most."""
    mark: tuple[int, int] | None = None
    """Part of `snippet` that differs, as a slice; None if the whole snippet does."""

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
    """Two requests that could share more tokens, and the spots where they differ."""

    earlier: Place
    later: Place
    shared_tokens: int
    """Tokens that the two prompts share at their start, as sent."""
    could_share_tokens: int
    """The same with the causes of all findings repaired."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of misses."""

    kind: str
    """Stable name, such as `timestamp`; `docs/doctor.md` explains each."""
    title: str
    """One line, without a full stop."""
    fix: str
    """Advice in a sentence or two."""
    lost_tokens: int
    """Prompt tokens that are computed again because of it; 0 for a finding that is not about speed."""
    share: float
    """`lost_tokens` divided by all prompt tokens of the log, 0 to 1."""
    requests: int
    """Requests that would hit more, or that are concerned if no tokens are lost."""
    divergence: Divergence | None
    """An instance; None if no pair of requests shows it."""

    @property
    def cost(self) -> str:
        """The cost in words."""
        if not self.lost_tokens:
            return f"No tokens lost; {counted(self.requests, 'request')} concerned"
        tokens, requests = counted(self.lost_tokens, "token"), counted(self.requests, "request")
        return f"{percent(self.share)} of all tokens: {tokens} computed again, {requests} would find more"


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record that could not be read."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What is lost in the cache of a profile."""

    name: str
    findings: tuple[Finding, ...]
    """Worst first. Losses are not divided, as those of `DoctorReport.findings` are: a log may lose the same tokens to
    another defect."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Results for one log. Tokens are those of the emulator's tokenizer, over all requests."""

    files: tuple[str, ...]
    requests: int
    conversations: int
    """Conversations of several requests, by their ids, or by requests that continue an earlier one."""
    prompt_tokens: int
    hit_tokens: int
    """Hits of a cache for the log as sent."""
    repaired_hit_tokens: int
    """Hits with the causes of all findings repaired: `hit_tokens` plus the tokens that the findings lose."""
    bound_tokens: int
    """Upper bound for any order of the same texts: all tokens that an earlier request contained at any place."""
    kv_block_size: int
    findings: tuple[Finding, ...]
    """Worst first."""
    skipped: tuple[SkippedRecord, ...] = ()
    """The first 100 at most."""
    skipped_lines: int = 0
    """Number of all skipped records."""
    notes: tuple[str, ...] = ()
    """Facts about the log itself, such as that the logger cut off its prompts."""
    reported_prompt_tokens: int | None = None
    """The engine's own count, in requests to models whose usage has cached tokens in some record; None without any."""
    reported_cached_tokens: int | None = None
    """The engine's own count of hits in the same requests."""
    profile: ProfileReport | None = None
    """Results for the cache of `--profile`; None without that option."""

    @property
    def lost_tokens(self) -> int:
        """Tokens that repairing all findings would save."""
        return self.repaired_hit_tokens - self.hit_tokens

    @property
    def lost_share(self) -> float:
        """`lost_tokens` divided by all prompt tokens, compared with `--fail-above`."""
        return self._ratio(self.lost_tokens)

    @property
    def hit_ratio(self) -> float:
        """Hits divided by all prompt tokens; 0 without any."""
        return self._ratio(self.hit_tokens)

    @property
    def repaired_hit_ratio(self) -> float:
        """Hit ratio with the causes of all findings repaired."""
        return self._ratio(self.repaired_hit_tokens)

    @property
    def bound_ratio(self) -> float:
        """Upper bound of the hit ratio."""
        return self._ratio(self.bound_tokens)

    def _ratio(self, tokens: int) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report for other programs, in the format that `docs/doctor.md` defines."""
        fields = asdict(self)
        findings = fields.pop("findings")
        return {
            "warmprefix": __version__,
            **fields,
            "hit_ratio": self.hit_ratio,
            "repaired_hit_ratio": self.repaired_hit_ratio,
            "bound_ratio": self.bound_ratio,
            "lost_tokens": self.lost_tokens,
            "lost_share": self.lost_share,
            "findings": findings,
        }
