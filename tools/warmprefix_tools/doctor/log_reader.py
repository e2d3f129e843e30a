"""Reads a log: each record becomes a request, the answer to the request before it, or a skipped record."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from warmprefix import WarmprefixError
from warmprefix_requests.usage import reported_usage, token_usage
from warmprefix_tools.doctor.bodies import UnreadableBodyError, body_messages, has_marks, tool_texts
from warmprefix_tools.doctor.findings import SkippedRecord
from warmprefix_tools.doctor.formats import format_of, is_message, plain_message
from warmprefix_tools.doctor.records import KEYS, LoggedPrompt, find_bodies, is_answer, is_unanswered, parse_line
from warmprefix_tools.doctor.request_log import CUT_MARKS, PLAIN, LogMessage, LogRequest, Prompt, RequestLog
from warmprefix_tools.doctor.transcripts import TRANSCRIPTS, AgentTranscript
from warmprefix_tools.inputs import InputError, opened
from warmprefix_tools.report.amounts import counted

__all__ = ["DoctorError", "ReadLog", "read_log", "split_rendered"]

_MAX_SKIPPED = 100
_MAX_REASON_LENGTH = 240
_MAX_FIELDS = 8
_ACCEPTED = (
    'Accepted are bodies of chat requests, {"messages": [...]}, one per line or in a JSON array; objects that contain'
    ' one, such as {"body": {...}}; bodies of other chat APIs, with "input", "system" or "contents"; spans of'
    " OpenTelemetry; exports of LangSmith and Langfuse; transcripts of Claude Code and Codex; and the log of vLLM."
)
_LOG_SIGNS = ("INFO", "DEBUG", "WARNING", "ERROR", "CRITICAL", "http")

_MARKUPS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant)\|>\n?(?P<text>.*?)(?:<\|end\|>\n?|</s>\n?|(?=<\|\w+\|>)|\Z)", re.DOTALL
    ),
)
_RENDERED_ROLES = {"model": "assistant", "ipython": "tool"}


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
        if not (result.skipped_lines or reader.others or reader.records):
            raise DoctorError(f"No request in {files}: empty. {_ACCEPTED}")
        first = "".join(f"; the first is {each.file}, line {each.line}: {each.reason}" for each in result.skipped[:1])
        others = "".join(f" Records without a prompt: {name}, {count}." for name, count in reader.others.items())
        raise DoctorError(
            f"No request in {files}. Unreadable records: {result.skipped_lines}{first}.{others} {_ACCEPTED}"
        )
    reader.add_notes()
    return result


class _LogReader:
    def __init__(self) -> None:
        self.result = ReadLog()
        self.log = self.result.log
        self.records = 0
        """Lines and values, readable or not."""
        self.others: Counter[str] = Counter()
        """Records of each format that are about something else than a prompt."""
        self._place = ("", 0)
        """File and line of the record that is being read."""
        self._logged_ids: set[str] = set()
        self._left_out: Counter[str] = Counter()
        """Requests without a prompt, without text or without an answer, by the end of a note on them."""
        self._usage: tuple[int, dict[str, Any]] = (-1, {})
        """A request, and what the latest records that answer it have reported."""
        self._requests_by_key: dict[str, int] = {}
        self._conversation: list[Mapping[str, Any]] = []
        """Messages of the file that are records of their own."""
        self._transcripts: dict[str, AgentTranscript] = {}
        self._transcript_turns: Counter[str] = Counter()

    def read(self, path: Path) -> None:
        name = str(path)
        try:
            with opened(path) as file:
                if file.is_json_document():
                    for number, value in file.json_values():
                        self._try(name, number, value)
                else:
                    for number, line in enumerate(file.lines(), 1):
                        self._try(name, number, line.decode("utf-8", "replace"))
                for kind, transcript in self._transcripts.items():
                    self._take_turns(kind, transcript.end(name))
                self._end_conversation()
        except InputError as error:
            place = name if error.line is None else f"{name}, line {error.line}"
            raise DoctorError(f"{place}: {error}.") from error.__cause__

    def add_notes(self) -> None:
        notes, log = self.result.notes, self.log
        marks = Counter[str]()
        for request in log.requests:
            marks.update({log.cut[message] for message in log.cut.keys() & request.messages})
        notes += [
            f"{counted(count, 'request')} of {len(log.requests)} have texts that were cut or masked in the log"
            f" ({mark}; {CUT_MARKS[mark]}). What differs there is not seen, so the figures may be wrong."
            for mark, count in marks.items()
        ]
        notes += [
            f"{counted(self._transcript_turns[each.name], 'request')} from transcripts of {each.name}, which lack"
            f" {each.missing}: only the engine's own count has these tokens."
            for each in TRANSCRIPTS
            if self._transcript_turns[each.name]
        ]
        notes += [f"{counted(count, 'request')} {note}" for note, count in self._left_out.items()]

    def _try(self, name: str, number: int, record: object) -> None:
        """Take one record; skip it if it can't be read."""
        self.records += 1
        self._place = (name, number)
        try:
            if isinstance(record, str):
                self._take_line(record)
            else:
                self._take_record(record)
        except (ValueError, RecursionError, SyntaxError) as error:
            self._skip(error)

    def _skip(self, error: Exception) -> None:
        self.result.skipped_lines += 1
        if len(self.result.skipped) < _MAX_SKIPPED:
            reason = (str(error) or type(error).__name__)[:_MAX_REASON_LENGTH]
            self.result.skipped.append(SkippedRecord(*self._place, reason))

    def _take_line(self, line: str) -> None:
        text = line.strip()
        if not text or text.startswith((":", "event:", "id:", "retry:")) or text == "data: [DONE]":
            return
        if text.startswith("data:"):
            self._take_answer(json.loads(text[5:]))
        elif text.startswith("[{"):
            records = json.loads(text)
            for record in [{"messages": records}] if all(map(is_message, records)) else records:
                self._try(*self._place, record)
        elif text.startswith("{"):
            for record in _concatenated(text):
                self._try(*self._place, record)
        elif (logged := parse_line(text)) is not None:
            self._take_logged(logged)
        elif text.startswith(("[", '"')):
            raise ValueError("not a JSON object")
        elif not any(sign in text[:120] for sign in _LOG_SIGNS):
            raise ValueError("neither JSON nor a line of a supported log")

    def _take_record(self, record: object) -> None:
        if not isinstance(record, Mapping):
            raise ValueError("not a JSON object")
        if is_unanswered(record):
            self._left_out["got no answer: left out, because no cache has them."] += 1
            return
        transcript = next((each for each in TRANSCRIPTS if each.recognise(record)), None)
        if transcript is not None:
            reader = self._transcripts.setdefault(transcript.name, transcript.reader(self._shown))
            self._take_turns(transcript.name, reader.take(record, self._place[0]))
            return
        before = (self.result.skipped_lines, len(self.log.requests))
        for found in find_bodies(record, self._skip):
            try:
                requests = list(self._requests(found.body))
            except ValueError as error:
                self._skip(error)
                continue
            for request in requests:
                if found.key is not None:
                    self._requests_by_key[found.key] = len(self.log.requests)
                self.log.requests.append(replace(request, **found.fields))
        if before != (self.result.skipped_lines, len(self.log.requests)):
            return
        key = next((str(record[name]) for name in KEYS if name in record), None)
        if key is not None or is_answer(record):
            self._take_answer(record, key)
        elif (form := format_of(record)) is not None:
            self.others[form.name] += 1
        elif is_message(record):
            self._conversation.append(record)
        else:
            inner = record.get("message") or record.get("msg") or record.get("log")  # of a logger that writes JSON
            logged = parse_line(inner) if isinstance(inner, str) else None
            if logged is None:
                fields = ", ".join([*map(str, record)][:_MAX_FIELDS]) or "none"
                raise ValueError(f"it has neither messages nor a prompt; its fields are: {fields}")
            self._take_logged(logged)

    def _end_conversation(self) -> None:
        """Take a request in front of each answer of a conversation, and one at the end if no answer ends it."""
        messages, self._conversation = self._conversation, []
        answers = [plain_message(message).get("role") == "assistant" for message in messages]
        for end, (before, after) in enumerate(pairwise([True, *answers, True])):
            if after and not before:
                self._try(*self._place, {"messages": messages[:end], "session_id": self._place[0]})

    def _take_turns(self, kind: str, requests: Iterator[LogRequest]) -> None:
        for request in requests:
            if request.messages:
                self._transcript_turns[kind] += 1
                file, line = self._place
                self.log.requests.append(replace(request, file=file, line=line))

    def _requests(self, body: Mapping[str, object]) -> Iterator[LogRequest]:
        if isinstance(body.get("messages"), list):
            messages, tools = list(body_messages(body)), tool_texts(body)
            prompt = [
                *([self.log.tools(tools)] if tools else []),
                *(self.log.message(m.role, m.text) for m in messages),
            ]
            front = len(prompt) - sum(message.in_list for message in messages)
            yield LogRequest(*self._place, tuple(prompt), front=front, marked=has_marks(body))
            return
        prompts = body.get("prompt")
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        for one in prompts:
            yield LogRequest(*self._place, self._rendered(one))

    def _shown(self, body: Mapping[str, object]) -> list[LogMessage]:
        """Return the messages of a body in the log."""
        return [self.log.message(message.role, message.text) for message in body_messages(body)]

    def _take_logged(self, logged: LoggedPrompt) -> None:
        if logged.id in self._logged_ids:  # vLLM may log one request twice, in full and in short
            return
        if logged.text is None and not logged.token_ids:
            self._left_out[
                "logged without a prompt: vLLM logs it with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG."
            ] += 1
            return
        prompt = self._rendered(logged.token_ids if logged.text is None else logged.text)
        self._logged_ids.add(logged.id)
        self.log.requests.append(LogRequest(*self._place, prompt))

    def _rendered(self, prompt: object) -> Prompt:
        """Return a prompt that was logged as text or token ids."""
        if not prompt:
            raise UnreadableBodyError("prompt is empty")
        if isinstance(prompt, str):
            return tuple(self.log.message(role, text) for role, text in split_rendered(prompt) or [(PLAIN, prompt)])
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise UnreadableBodyError("prompt is neither text nor token ids")
        self._left_out["logged as token ids without text: their hits count, but no defect is searched there."] += 1
        return (LogMessage(PLAIN, self.log.pool.token_ids([token & 0xFFFF_FFFF for token in prompt])),)

    def _take_answer(self, record: object, key: str | None = None) -> None:
        requests = self.log.requests
        index = len(requests) - 1
        if key is not None and isinstance(record, Mapping):  # a line of a batch's results
            index = self._requests_by_key.get(key, -1)
            record = record.get("response") or record.get("result")
            self.others["results of a batch without its requests"] += index < 0
        answered, before = self._usage
        usage = reported_usage(record, before if answered == index else None)
        self._usage = index, usage
        tokens = token_usage(usage)
        if tokens.prompt_tokens is not None and index >= 0:
            requests[index] = replace(
                requests[index],
                reported_prompt_tokens=tokens.prompt_tokens,
                reported_cached_tokens=tokens.cached_tokens,
            )


def _concatenated(text: str) -> Iterator[object]:
    """Yield the JSON values of one line, which usually is one."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield value
        at += len(text) - at - len(text[at:].lstrip())


def split_rendered(prompt: str) -> list[tuple[str, str]] | None:
    r"""Return role and text of each message of a rendered prompt; None if its markup is unknown.

    >>> split_rendered("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [('user', 'Hi')]
    """
    for markup in _MARKUPS:
        found = [(_RENDERED_ROLES.get(part["role"], part["role"]), part["text"]) for part in markup.finditer(prompt)]
        if found:
            return found[:-1] if found[-1] == ("assistant", "") else found  # the template opens the answer
    return None
