"""Reads a log: each record becomes a request, the answer to the request before it, or a skipped record."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from warmprefix import WarmprefixError
from warmprefix_tools.doctor.bodies import UnreadableBodyError, body_messages, tool_parts
from warmprefix_tools.doctor.findings import SkippedRecord
from warmprefix_tools.doctor.records import (
    FoundBody,
    LoggedPrompt,
    answer_usage,
    find_body,
    is_answer,
    is_unanswered,
    parse_line,
    split_rendered,
)
from warmprefix_tools.doctor.request_log import PLAIN, LogMark, LogMessage, LogRequest, Prompt, RequestLog
from warmprefix_tools.inputs import InputError, opened
from warmprefix_tools.report.amounts import counted

__all__ = ["DoctorError", "ReadLog", "read_log"]

_MAX_SKIPPED = 100
_MAX_REASON_LENGTH = 120
_CUT_PROMPTS = 3
"""If this many of the longest logged prompts have the same length, the logger probably cuts prompts."""
_ACCEPTED = (
    'Accepted are bodies of chat requests, {"messages": [...]}, one per line or in a JSON array; objects that contain'
    ' one, such as {"body": {...}}; bodies of other chat APIs, with "input" or "system"; and the log of vLLM.'
)
_LOG_SIGNS = ("INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL", "curl ", "POST Request", "http")


class DoctorError(WarmprefixError):
    """A log that can't be read or contains no request; the message gives the reason to the user."""


@dataclass(slots=True)
class ReadLog:
    """A log, and the records that could not be read."""

    log: RequestLog = field(default_factory=RequestLog)
    skipped: list[SkippedRecord] = field(default_factory=list)
    """The first 100 at most."""
    skipped_lines: int = 0
    notes: list[str] = field(default_factory=list)


def read_log(paths: Sequence[Path]) -> ReadLog:
    """Read files, in this order, as one log; gzipped files are unpacked, whatever their names.

    Raises:
        DoctorError: A file can't be read, or none contains a request.
    """
    reader = _LogReader()
    for path in paths:
        reader.read(path)
    result = reader.result
    if not result.log.requests:
        files = ", ".join(map(str, paths))
        first = "".join(f"; the first is {each.file}, line {each.line}: {each.reason}" for each in result.skipped[:1])
        raise DoctorError(f"No request in {files}. Unreadable records: {result.skipped_lines}{first}. {_ACCEPTED}")
    reader.add_notes()
    return result


class _LogReader:
    def __init__(self) -> None:
        self.result = ReadLog()
        self._logged_ids: set[str] = set()
        self._lengths: list[int] = []
        self._without_prompt = 0
        self._token_id_prompts = 0
        self._unanswered = 0

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
        cut = self._lengths.count(longest)
        if cut >= max(_CUT_PROMPTS, len(self._lengths) // 10) and len(set(self._lengths)) > 1:
            notes.append(
                f"{cut} logged prompts end after exactly {longest:,} characters: the logger seems to cut them"
                " (vLLM: --max-log-len). The text behind the cut is not examined."
            )
        if self._without_prompt:
            notes.append(
                f"{self._without_prompt} requests were logged without their prompt;"
                " vLLM logs it with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."
            )
        if self._unanswered:
            notes.append(f"{counted(self._unanswered, 'request')} got no answer: left out, because no cache has them.")
        if self._token_id_prompts:
            notes.append(
                f"{self._token_id_prompts} prompts are token ids without text:"
                " their hits count, but they are not searched for defects."
            )

    def _try(self, name: str, number: int, record: object) -> None:
        """Take one record; skip it if it can't be read."""
        try:
            if isinstance(record, str):
                self._take_line(name, number, record)
            else:
                self._take_record(name, number, record)
        except (ValueError, RecursionError, SyntaxError) as error:
            self.result.skipped_lines += 1
            if len(self.result.skipped) < _MAX_SKIPPED:
                reason = (str(error) or type(error).__name__)[:_MAX_REASON_LENGTH]
                self.result.skipped.append(SkippedRecord(name, number, reason))

    def _take_line(self, name: str, number: int, line: str) -> None:
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
        elif text.startswith("-d '") and text.rstrip("\\ ").endswith("'"):  # of a curl command
            body = text.rstrip("\\ ")[4:-1]
            self._take_record(name, number, json.loads(body) if body.startswith('{"') else ast.literal_eval(body))
        elif (logged := parse_line(text)) is not None:
            self._take_logged(name, number, logged)
        elif text.startswith(("[", '"')):
            raise ValueError("not a JSON object")
        elif not any(sign in text[:120] for sign in _LOG_SIGNS):
            raise ValueError("neither JSON nor a line of a supported log")

    def _take_record(self, name: str, number: int, record: object) -> None:
        if not isinstance(record, Mapping):
            raise ValueError("not a JSON object")
        if is_unanswered(record):
            self._unanswered += 1
            return
        found = find_body(record)
        if found is not None:
            for request in self._prompts(name, number, found):
                self.result.log.requests.append(
                    replace(
                        request,
                        model=found.model,
                        salt=found.salt,
                        tenant=found.tenant,
                        user=found.user,
                        session=found.session,
                        reported_prompt_tokens=found.prompt_tokens,
                        reported_cached_tokens=found.cached_tokens,
                        seconds=found.seconds,
                    )
                )
        elif is_answer(record):
            self._take_answer(record)
        else:
            inner = record.get("message") or record.get("msg") or record.get("log")  # of a logger that writes JSON
            logged = parse_line(inner) if isinstance(inner, str) else None
            if logged is None:
                raise ValueError("it has neither messages nor a prompt")
            self._take_logged(name, number, logged)

    def _prompts(self, name: str, number: int, found: FoundBody) -> Iterator[LogRequest]:
        body = found.body
        if isinstance(body.get("messages"), list):
            yield self._chat(name, number, body)
            return
        prompts = body.get("prompt")
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        for one in prompts:
            if isinstance(one, str):
                yield LogRequest(name, number, self._rendered(one))
            elif isinstance(one, list) and all(isinstance(token, int) for token in one):
                yield LogRequest(name, number, self._token_ids(one))
            else:
                raise UnreadableBodyError("prompt is neither text nor token ids")

    def _chat(self, name: str, number: int, body: Mapping[str, object]) -> LogRequest:
        log = self.result.log
        messages = body_messages(body)
        tools = tool_parts(body)
        prompt = [log.tools([tool.text for tool in tools])] if tools else []
        prompt += [log.message(message.role, "\n".join([part.text for part in message.parts])) for message in messages]
        parts = [tools] if tools else []
        parts += [list(message.parts) for message in messages]
        ends: list[tuple[int, ...]] = []
        marks: list[LogMark] = []
        for at, of_message in enumerate(parts):
            if tools and not at:
                ends.append(tuple(accumulate([len(part.text) + len("[,") for part in of_message])))
            else:
                ends.append(tuple([end - 1 for end in accumulate([len(part.text) + 1 for part in of_message])]))
            for part, end in zip(of_message, ends[-1], strict=True):
                if part.marked:
                    marks.append(LogMark(at, end, part.lifetime))
        front = len(prompt) - sum(message.in_list for message in messages)
        return LogRequest(name, number, tuple(prompt), front=front, part_ends=tuple(ends), marks=tuple(marks))

    def _take_logged(self, name: str, number: int, logged: LoggedPrompt) -> None:
        if logged.id in self._logged_ids:  # vLLM may log one request twice, in full and in short
            return
        if logged.text is not None:
            self._lengths.append(len(logged.text))
            messages = self._rendered(logged.text)
        elif logged.token_ids:
            messages = self._token_ids(logged.token_ids)
        else:
            self._without_prompt += 1
            return
        self._logged_ids.add(logged.id)
        self.result.log.requests.append(LogRequest(name, number, messages))

    def _rendered(self, prompt: str) -> Prompt:
        if not prompt:
            raise UnreadableBodyError("prompt is empty")
        log = self.result.log
        return tuple(log.message(role, text) for role, text in split_rendered(prompt) or [(PLAIN, prompt)])

    def _token_ids(self, tokens: Sequence[int]) -> Prompt:
        if not tokens:
            raise UnreadableBodyError("prompt is empty")
        self._token_id_prompts += 1
        return (LogMessage(PLAIN, self.result.log.pool.token_ids([token & 0xFFFF_FFFF for token in tokens])),)

    def _take_answer(self, record: object) -> None:
        requests = self.result.log.requests
        usage = answer_usage(record) if isinstance(record, Mapping) else None
        if usage is not None and requests:
            requests[-1] = replace(requests[-1], reported_prompt_tokens=usage[0], reported_cached_tokens=usage[1])
