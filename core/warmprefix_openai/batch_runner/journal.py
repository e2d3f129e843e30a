"""Results of a run while they wait for their turn: in memory, or in a journal that outlives the process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from warmprefix.batch import PlannedRequest
from warmprefix.errors import BatchFileError
from warmprefix_openai.completion import ChatFields

__all__ = ["BatchResult", "Journal", "MemoryResults", "Messages", "Results", "digest_of_options", "digest_of_request"]

_VERSION = 1
"""Raised with the file's format, and with whatever `PlannedRequest.messages` writes around what it is given."""

_APPLICATION = 0x7770626A  # "wpbj", in the header of the file

_MAX_RESULT_BYTES = 64 * 1024 * 1024
_MAX_ID_BYTES = 1024 * 1024
"""Most bytes of a result, and of its id, that are read back from an earlier run."""

Messages = Callable[[PlannedRequest], Sequence[Mapping[str, Any]]]
"""Function that makes the chat for a request."""


@dataclass(frozen=True, slots=True)
class BatchResult(ChatFields):
    """One request's answer, or its failure: of `completion` and `error`, one is None."""

    request: PlannedRequest
    """The request, in its place in the batch."""
    completion: Mapping[str, Any] | None = field(repr=False)
    """The chat completion as JSON, as it would have come without streaming."""
    error: str | None
    """Kind and message of the last attempt's failure."""
    attempts: int
    """Number of attempts in the run that brought this result; 0 if unknown."""
    ttft: float | None
    """Seconds from sending the last attempt to its first token; None where not measured."""

    @property
    def id(self) -> str:
        """The request's own id."""
        return self.request.id


class MemoryResults:
    """Results in memory, until they are taken."""

    def __init__(self) -> None:
        self.answered: Collection[str] = ()
        """Ids of the requests that an earlier run has answered; they are not sent again."""
        self._results: dict[str, BatchResult] = {}

    def put(self, result: BatchResult) -> None:
        self._results[result.id] = result

    def take(self, id: str) -> BatchResult:
        return self._results.pop(id)

    def close(self) -> None:
        """Do nothing."""


class Journal:
    """Results in an SQLite database, and nowhere else. One run at a time can use it, and only its owner can read it.

    A result reaches the operating system before it is handed out, so a killed process loses only the requests in
    flight. SQLite's write-ahead log forces results to the disk now and then, and when the run ends; a power cut before
    that can lose the last ones, whose requests are sent again, but never damages the journal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        requests: Mapping[str, PlannedRequest],
        *,
        model: str,
        options: str,
        digests: Sequence[bytes],
    ) -> None:
        """Open the journal, or begin one, and keep every other run out of it.

        Args:
            path: The file.
            requests: The requests of the batch, by id.
            model: The model that is asked.
            options: As `digest_of_options` returns it.
            digests: The digest of each request, in any order.

        Raises:
            BatchFileError: The file is another batch's, of another version, in use, or damaged, or it can't be read or
                written.
        """
        self.path = os.fspath(path)
        self.answered: Collection[str] = ()
        self._requests = requests
        asked = _digest(b"".join(sorted(digests))).hexdigest()
        header = {"model": model, "options": options, "requests": asked, "count": len(requests)}
        try:
            # SQLite does not report why a file can't be opened, and would let all users read it.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise self._problem(f"it can't be opened: {error.strerror}") from error
        with contextlib.ExitStack() as unless_read:
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            unless_read.callback(self._connection.close)
            with self._reading():
                self._lock()
                self._check_header(header)
                self.answered = frozenset(self._read())
            unless_read.pop_all()

    def put(self, result: BatchResult) -> None:
        """Store a result."""
        line: dict[str, Any] = {"id": result.id, "attempts": result.attempts}
        if result.error is None:
            line |= {"ttft": result.ttft, "completion": result.completion}
        else:
            line["error"] = result.error
        try:
            row = (_encoded(result.id), _encoded(line))
            self._connection.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", row)
        except sqlite3.Error as error:
            raise self._problem(f"it can't be written: {error}") from error

    def take(self, id: str) -> BatchResult:
        """Read a result back."""
        with self._reading():
            (text,) = self._connection.execute("SELECT result FROM results WHERE id = ?", (_encoded(id),)).fetchone()
        line = json.loads(text)
        completion, error, ttft = line.get("completion"), line.get("error"), line.get("ttft")
        return BatchResult(self._requests[id], completion, error, line["attempts"], ttft)

    def close(self) -> None:
        """Force it to the disk and let other runs in. Closing twice is harmless."""
        self._connection.close()

    def _lock(self) -> None:
        # With this mode, the lock of the first transaction is kept until the connection closes or its process ends.
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise self._problem("another run is using it") from error
        self._connection.execute("COMMIT")

    def _check_header(self, expected: Mapping[str, Any]) -> None:
        application, version = self._value("PRAGMA application_id"), self._value("PRAGMA user_version")
        if not (application or self._value("SELECT count(*) FROM sqlite_master")):
            return self._begin(expected)
        if application != _APPLICATION:
            raise self._problem("it is no journal of a batch")
        if version != _VERSION:
            raise self._problem(f"it is of version {version}, and this warmprefix reads version {_VERSION}")
        found = json.loads(self._value("SELECT header FROM run WHERE length(header) <= 65536"))
        if found["model"] != expected["model"]:
            raise self._problem(f"it is of another run: of model {found['model']!r}, not {expected['model']!r}")
        if found["options"] != expected["options"]:
            raise self._problem("it is of another run: with other request options")
        if found["requests"] != expected["requests"]:
            raise self._problem(f"it is of another batch: of {found['count']} requests, not these {expected['count']}")
        return self._log_ahead()

    def _begin(self, header: Mapping[str, Any]) -> None:
        self._log_ahead()
        try:
            for statement in (
                "BEGIN",
                f"PRAGMA application_id = {_APPLICATION}",
                f"PRAGMA user_version = {_VERSION}",
                "CREATE TABLE run (header BLOB NOT NULL)",
                "CREATE TABLE results (id BLOB PRIMARY KEY, result BLOB NOT NULL)",
            ):
                self._connection.execute(statement)
            self._connection.execute("INSERT INTO run VALUES (?)", (_encoded(header),))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._problem(f"it can't be written: {error}") from error

    def _log_ahead(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def _read(self) -> Iterator[str]:
        """Check every result, one at a time; yield the ids of the answers. Results that are too large do not count."""
        select = "SELECT id, result FROM results WHERE length(id) <= ? AND length(result) <= ?"
        for key, text in self._connection.execute(select, (_MAX_ID_BYTES, _MAX_RESULT_BYTES)):
            id, line = json.loads(key), json.loads(text)
            if id not in self._requests:
                raise self._problem(f"no request of this batch is called {id!r}")
            if type(line["attempts"]) is not int or ("completion" in line) == ("error" in line):
                raise ValueError(f"the result of request {id!r}")
            if "completion" in line:
                yield id

    def _value(self, query: str) -> Any:
        row = self._connection.execute(query).fetchone()
        return None if row is None else row[0]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn every way in which the file's content can be wrong into a `BatchFileError`."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):
                raise self._problem("it is no journal of a batch") from error
            raise self._problem(f"it is damaged, or can't be read: {error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise self._problem(f"it is damaged: {error}") from error

    def _problem(self, problem: str) -> BatchFileError:
        return BatchFileError(self.path, None, problem)


Results = MemoryResults | Journal
"""Place that takes every request's result once, and returns it once."""


def digest_of_request(planned: PlannedRequest, messages: Messages) -> bytes:
    """Return a digest of a request's id, its tenant, and its messages with the blocks in relevance order.

    So it does not depend on the plan. Default messages are not rendered: their parts, with each block's fingerprint,
    give the same distinction in a tenth of the time.

    Raises:
        TypeError: The messages are not JSON.
    """
    order = sorted(planned.order)
    if messages is PlannedRequest.messages:
        # Everything that decides on the bytes of the default messages; the rest is under the journal's version.
        wording, request = planned.wording, planned.request
        keys = [request.blocks[position].fingerprint for position in order]
        blocks = [text for key in keys for text in (wording.labels.get(key, ""), key.hex())]
        templates = wording.writer.templates
        shown = [wording.annotation, templates.order, templates.quotes, templates.most_quoted, templates.most_named]
        asked: list[Any] = [wording.preamble, shown, request.question, blocks]
    else:
        asked = list(messages(replace(planned, order=tuple(order))))
    asked = [planned.id, planned.wording.scope.tenant, asked]
    return _digest(_canonical(f"the messages of request {planned.id!r}", asked)).digest()


def digest_of_options(options: Mapping[str, Any]) -> str:
    """Return a digest of the options of every request, without headers: they identify the caller, not the question.

    Raises:
        TypeError: The options are not JSON.
    """
    body = {name: value for name, value in options.items() if name != "extra_headers"}
    return _digest(_canonical("request options", body)).hexdigest()


def _canonical(what: str, value: object) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    except TypeError as error:
        raise TypeError(f"with a journal, {what} must be JSON: {error}") from error


def _digest(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def _encoded(value: object) -> bytes:
    """Return JSON as bytes, whose length SQLite reports without reading them."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
