"""The answers of a run in a SQLite file, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_tools.quality.cache_probe import SaltSupport
from warmprefix_tools.quality.questions import EvidenceQuestion

try:
    from pydantic import TypeAdapter
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["AnswerStore", "CallKey", "GivenAnswer", "Judgement", "StoreFileError"]

_VERSION = 4
_QUESTIONS = TypeAdapter(list[EvidenceQuestion])
_TABLES = """
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answer (
    question TEXT NOT NULL, arm TEXT NOT NULL, repeat INTEGER NOT NULL, fields TEXT NOT NULL,
    PRIMARY KEY (question, arm, repeat)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS judgement (
    question TEXT NOT NULL, arm TEXT NOT NULL, arm_first INTEGER NOT NULL, preferred TEXT,
    PRIMARY KEY (question, arm, arm_first)
) WITHOUT ROWID;
"""


class StoreFileError(WarmprefixError):
    """A file of answers cannot be used; the message has the reason."""


class CallKey(NamedTuple):
    """One call of a run."""

    question: str
    arm: str
    repeat: int


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """What came back for one call."""

    key: CallKey
    is_changed: bool
    """False if the prompt was the baseline's."""
    text: str | None
    """None if the call failed."""
    problem: str | None = None
    """`truncated`, or why there is no text."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    seconds: float = 0.0
    citations: int | None = None
    """Labels that the answer names; None if the prompt has none to name."""
    right_citations: int | None = None
    """Those of passages that the answer follows from."""
    has_other_evidence: bool = False
    """See `ArmPrompt`."""


class Judgement(NamedTuple):
    """What a judge returned for a question's answers in one arm and its baseline."""

    question: str
    arm: str
    arm_first: bool
    """True if the judge read the arm's answer first."""
    preferred: str | None
    """`arm`, `baseline` or `neither`; None if the judge returned something else."""


class AnswerStore:
    """One file with the settings, the questions and the answers of one run, for its owner only. Not thread-safe.

    Raises:
        StoreFileError: The file can't be opened, or was not written by this command.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let all users read it
            self._file = sqlite3.connect(path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreFileError(f"{path} cannot be used: {error}") from error
        try:
            self._file.executescript(f"PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; {_TABLES}")
        except sqlite3.Error as error:
            self._file.close()
            raise StoreFileError(f"{path} cannot be used: {error}") from error

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; an error of SQLite becomes a StoreFileError."""
        self._file.close()
        if isinstance(error, sqlite3.Error):
            raise StoreFileError(f"{self.path} cannot be used: {error}") from error

    def begin(self, settings: Mapping[str, Any], questions: Sequence[EvidenceQuestion]) -> None:
        """Store settings and questions, or check that the file's are the same.

        Raises:
            StoreFileError: The file belongs to another run.
        """
        wanted = {name: json.dumps(value) for name, value in {"version": _VERSION, **settings}.items()}
        wanted["questions"] = _QUESTIONS.dump_json(list(questions)).decode()
        stored = dict(self._file.execute("SELECT name, value FROM run").fetchall())
        different = [name for name in wanted if stored.get(name) != wanted[name]]
        if stored and different:
            what = ", ".join(different)
            raise StoreFileError(f"{self.path} has the answers of a run with other {what}: choose another file")
        if not stored:
            self._file.execute("BEGIN IMMEDIATE")
            with self._file:
                self._file.executemany("INSERT INTO run VALUES (?, ?)", wanted.items())

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run.

        Raises:
            StoreFileError: The file holds no run.
        """
        rows = self._file.execute("SELECT name, value FROM run WHERE name <> 'questions'")
        stored = {name: json.loads(value) for name, value in rows}
        if stored.pop("version", None) != _VERSION:
            raise StoreFileError(f"{self.path} holds no run of this version")
        return stored

    def questions(self) -> list[EvidenceQuestion]:
        """Return the questions in their order."""
        (text,) = self._file.execute("SELECT value FROM run WHERE name = 'questions'").fetchone()
        return _QUESTIONS.validate_json(text)

    def add(self, answer: GivenAnswer) -> None:
        """Store an answer at once; the first one of a call stays."""
        fields = asdict(answer)
        values = (*fields.pop("key"), json.dumps(fields))
        self._file.execute("INSERT OR IGNORE INTO answer VALUES (?, ?, ?, ?)", values)

    def done(self) -> set[CallKey]:
        """Return the calls that have an answer, or failed for a reason that will not go away."""
        return {CallKey(*row) for row in self._file.execute("SELECT question, arm, repeat FROM answer")}

    def answers(self) -> Iterator[GivenAnswer]:
        """Yield all answers, by question, arm and repeat."""
        for *key, fields in self._file.execute("SELECT * FROM answer"):
            yield GivenAnswer(CallKey(*key), **json.loads(fields))

    def salt(self) -> str:
        """Return a text of this run alone, the same whenever it goes on."""
        return str(self._noted("salt", secrets.token_hex(8)))

    def note_salts(self, support: SaltSupport) -> SaltSupport:
        """Store what the engine does with salts, and return what holds for the whole run, also its earlier parts."""
        stored: SaltSupport = self._noted("salts", support)
        if stored == "kept" != support:
            self._file.execute("UPDATE run SET value = ? WHERE name = 'salts'", [json.dumps(support)])
            return support
        return stored

    def forget_endpoint(self) -> None:
        """Remove what was stored by `note_salts` and `note_engine`."""
        self._file.execute("DELETE FROM run WHERE name IN ('salts', 'engine')")

    def note_engine(self, engine: Mapping[str, Any]) -> None:
        """Store which model the endpoint serves, or check that it is the one of the run's earlier parts.

        `software`, the version of the engine, may change.

        Raises:
            StoreFileError: It is another model.
        """
        stored = self._noted("engine", engine)
        changed = {
            name: f"{stored.get(name)} before, {engine.get(name)} now"
            for name in sorted({*stored, *engine} - {"software"})
            if stored.get(name) != engine.get(name)
        }
        if changed:
            what = "; ".join([f"{name}: {values}" for name, values in changed.items()])
            raise StoreFileError(f"{self.path} has the answers of another model ({what}): choose another file")

    def _noted(self, name: str, value: Any) -> Any:
        """Return what is stored under a name; store the value if there is nothing."""
        self._file.execute("INSERT OR IGNORE INTO run VALUES (?, ?)", [name, json.dumps(value)])
        return json.loads(self._file.execute("SELECT value FROM run WHERE name = ?", [name]).fetchone()[0])

    def begin_judging(self, judge: str) -> set[tuple[str, str, bool]]:
        """Store the name of the judge; return question, arm and order of all judgements.

        Raises:
            StoreFileError: Another model has judged these answers.
        """
        stored = self.judge()
        if stored not in (None, judge):
            raise StoreFileError(f"{self.path} has the judgements of {stored}, not of {judge}")
        self._noted("judge", judge)
        return {(question, arm, arm_first) for question, arm, arm_first, _ in self.judgements()}

    def judge(self) -> str | None:
        """Return the name of the judge; None without one."""
        row = self._file.execute("SELECT value FROM run WHERE name = 'judge'").fetchone()
        return None if row is None else json.loads(row[0])

    def add_judgement(self, judgement: Judgement) -> None:
        """Store a judgement at once; the first one stays."""
        self._file.execute("INSERT OR IGNORE INTO judgement VALUES (?, ?, ?, ?)", judgement)

    def judgements(self) -> Iterator[Judgement]:
        """Yield all judgements, by question, arm and order."""
        for question, arm, arm_first, preferred in self._file.execute("SELECT * FROM judgement"):
            yield Judgement(question, arm, bool(arm_first), preferred)
