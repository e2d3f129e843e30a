"""Reading a log: each record into a request, an answer to the request before it, or a note why not."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from warmprefix_tools.doctor.errors import DoctorError
from warmprefix_tools.doctor.prompts import PLAIN, Log, Message, Request
from warmprefix_tools.doctor.readers.bodies import Found, answer_usage, find_body, is_answer
from warmprefix_tools.doctor.readers.content import UnreadableBodyError, message_text, tool_texts
from warmprefix_tools.doctor.readers.markup import split_rendered
from warmprefix_tools.doctor.readers.vllm import LoggedPrompt, parse_line
from warmprefix_tools.doctor.report import Skipped
from warmprefix_tools.inputs import InputError, opened

__all__ = ["ReadLog", "read_log"]

_MOST_SKIPPED = 100
_LONGEST_REASON = 120
_ALIKE = 3
"""As many prompts of one length, the greatest, look cut off by the logger."""
_ACCEPTED = (
    'Accepted are bodies of chat requests, {"messages": [...]}, one per line or in a JSON array; objects that hold one,'
    ' such as {"body": {...}} or {"input": [...]}; and the log of vLLM.'
)


@dataclass(slots=True)
class ReadLog:
    """A log, and what could not be read of it."""

    log: Log = field(default_factory=Log)
    skipped: list[Skipped] = field(default_factory=list)
    skipped_lines: int = 0
    notes: list[str] = field(default_factory=list)


def read_log(paths: Sequence[Path]) -> ReadLog:
    """Read files, in this order, as one log; gzipped files are unpacked, whatever their names.

    Raises:
        DoctorError: A file can't be read, or none holds a request.
    """
    reader = _Reader()
    for path in paths:
        reader.read(path)
    result = reader.result
    if not result.log.requests:
        first = f"; the first is {_place(result.skipped[0])}" if result.skipped else ""
        files = ", ".join(map(str, paths))
        raise DoctorError(f"No request in {files}. Unreadable records: {result.skipped_lines}{first}. {_ACCEPTED}")
    reader.add_notes()
    return result


def _place(skipped: Skipped) -> str:
    return f"{skipped.file}, line {skipped.line}: {skipped.reason}"


class _Reader:
    def __init__(self) -> None:
        self.result = ReadLog()
        self._logged: dict[str, int] = {}
        self._lengths: list[int] = []
        self._unlogged = 0
        self._id_prompts = 0

    def read(self, path: Path) -> None:
        name = str(path)
        try:
            with opened(path) as file:
                if file.is_json_document():
                    for number, value in file.json_values():
                        self._try(name, number, value)
                    return
                for number, line in enumerate(file.lines(), 1):
                    self._try(name, number, line.decode("utf-8", "replace"))
        except InputError as error:
            place = name if error.line is None else f"{name}, line {error.line}"
            raise DoctorError(f"{place}: {error}.") from error.__cause__

    def add_notes(self) -> None:
        notes = self.result.notes
        longest = max(self._lengths, default=0)
        if self._lengths.count(longest) >= max(_ALIKE, len(self._lengths) // 10) and len(set(self._lengths)) > 1:
            notes.append(
                f"{self._lengths.count(longest)} logged prompts end after exactly {longest:,} characters: the logger"
                " seems to cut them (vLLM: --max-log-len), so what follows is not looked at."
            )
        if self._unlogged:
            notes.append(
                f"{self._unlogged} requests were logged without their prompt;"
                " vLLM logs it with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."
            )
        if self._id_prompts:
            notes.append(
                f"{self._id_prompts} prompts are token ids without text: their hits count, nothing is found in them."
            )

    def _try(self, name: str, number: int, record: object) -> None:
        try:
            if isinstance(record, str):
                self._read_line(name, number, record)
            else:
                self._take_record(name, number, record)
        except (ValueError, RecursionError, SyntaxError) as error:
            self._skip(name, number, str(error) or type(error).__name__)

    def _read_line(self, name: str, number: int, line: str) -> None:
        text = line.strip()
        if not text or text.startswith((":", "event:", "id:", "retry:")) or text == "data: [DONE]":
            return
        if text.startswith("data:"):
            self._take_answer(json.loads(text[5:]))
        elif text.startswith("[{"):
            for record in json.loads(text):
                self._try(name, number, record)
        elif text.startswith("{"):
            self._take_record(name, number, json.loads(text))
        elif text.startswith("-d '") and text.rstrip("\\ ").endswith("'"):
            self._take_record(name, number, _quoted(text.rstrip("\\ ")[4:-1]))
        else:
            logged = parse_line(text)
            if logged is not None:
                self._take_logged(name, number, logged)
            elif text.startswith(("[", '"')):
                raise ValueError("not a JSON object")
            elif not _is_log_line(text):
                raise ValueError("neither JSON nor a line of a known log")

    def _take_record(self, name: str, number: int, record: object) -> None:
        if not isinstance(record, Mapping):
            raise ValueError("not a JSON object")
        found = find_body(record)
        if found is None:
            if is_answer(record):
                self._take_answer(record)
                return
            inner = record.get("message") or record.get("msg") or record.get("log")
            if isinstance(inner, str) and (logged := parse_line(inner)) is not None:  # a logger that writes JSON
                self._take_logged(name, number, logged)
                return
            raise ValueError("no messages and no prompt in it")
        for messages in self._prompts(found):
            self._add(
                Request(
                    name,
                    number,
                    messages,
                    model=found.body["model"] if isinstance(found.body["model"], str) else None,
                    salt=found.salt,
                    tenant=found.tenant,
                    user=found.user,
                    session=found.session,
                    reported_prompt_tokens=found.prompt_tokens,
                    reported_cached_tokens=found.cached_tokens,
                )
            )

    def _prompts(self, found: Found) -> Iterator[tuple[Message, ...]]:
        body, log = found.body, self.result.log
        messages = body.get("messages")
        if isinstance(messages, list):
            if not messages:
                raise UnreadableBodyError("messages is empty")
            tools = tool_texts(body)
            prompt = [log.tools(tools)] if tools else []
            for at, message in enumerate(messages):
                role = message.get("role")
                if not isinstance(role, str) or not role:
                    raise UnreadableBodyError(f"messages[{at}] has no role")
                prompt.append(log.message(role, message_text(message, at)))
            yield tuple(prompt)
            return
        prompt_field = body.get("prompt")
        if isinstance(prompt_field, list) and prompt_field and isinstance(prompt_field[0], int):
            prompt_field = [prompt_field]
        for one in prompt_field if isinstance(prompt_field, list) else [prompt_field]:
            if isinstance(one, str):
                yield self._rendered(one)
            elif isinstance(one, list) and all(isinstance(token, int) for token in one):
                yield self._token_ids(one)
            else:
                raise UnreadableBodyError("prompt is neither text nor token ids")

    def _take_logged(self, name: str, number: int, logged: LoggedPrompt) -> None:
        if logged.id in self._logged:  # vLLM may log one request twice, in full and in short
            return
        if logged.text is not None:
            self._lengths.append(len(logged.text))
            messages = self._rendered(logged.text)
        elif logged.token_ids:
            messages = self._token_ids(logged.token_ids)
        else:
            self._unlogged += 1
            return
        self._logged[logged.id] = number
        self._add(Request(name, number, messages))

    def _rendered(self, prompt: str) -> tuple[Message, ...]:
        if not prompt:
            raise UnreadableBodyError("prompt is empty")
        log = self.result.log
        messages = split_rendered(prompt)
        return tuple(log.message(role, text) for role, text in messages) if messages else (log.message(PLAIN, prompt),)

    def _token_ids(self, tokens: Sequence[int]) -> tuple[Message, ...]:
        if not tokens:
            raise UnreadableBodyError("prompt is empty")
        self._id_prompts += 1
        return (Message(PLAIN, self.result.log.pool.token_ids([token & 0xFFFF_FFFF for token in tokens])),)

    def _take_answer(self, record: object) -> None:
        requests = self.result.log.requests
        usage = answer_usage(record) if isinstance(record, Mapping) else None
        if usage is not None and requests:
            requests[-1] = replace(requests[-1], reported_prompt_tokens=usage[0], reported_cached_tokens=usage[1])

    def _add(self, request: Request) -> None:
        self.result.log.requests.append(request)

    def _skip(self, name: str, number: int, reason: str) -> None:
        self.result.skipped_lines += 1
        if len(self.result.skipped) < _MOST_SKIPPED:
            self.result.skipped.append(Skipped(name, number, reason[:_LONGEST_REASON]))


def _quoted(text: str) -> object:
    """The body of a curl command, as JSON or as Python shows a dict."""
    return json.loads(text) if text.startswith('{"') else ast.literal_eval(text)


def _is_log_line(text: str) -> bool:
    """Whether a server wrote it, about something else than a prompt."""
    start = text[:120]
    return any(
        level in start for level in ("INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL", "curl ", "POST Request", "http")
    )
