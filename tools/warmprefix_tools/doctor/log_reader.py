"""Reads a log: each record becomes a request, the answer to the request before it, or a skipped record."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from warmprefix import WarmprefixError
from warmprefix_requests.usage import reported_usage, token_usage
from warmprefix_tools.doctor.bodies import BodyMessage, UnreadableBodyError, body_messages, tool_parts
from warmprefix_tools.doctor.findings import SkippedRecord
from warmprefix_tools.doctor.formats import UnreadableRecordError, format_of
from warmprefix_tools.doctor.records import (
    KEYS,
    FoundBody,
    LoggedPrompt,
    find_bodies,
    is_answer,
    is_unanswered,
    parse_line,
    split_rendered,
)
from warmprefix_tools.doctor.request_log import (
    CUT_MARKS,
    PLAIN,
    LogMark,
    LogMessage,
    LogRequest,
    Prompt,
    RequestLog,
)
from warmprefix_tools.doctor.transcripts import (
    TRANSCRIPTS,
    AgentTranscript,
    LoggedTurn,
    LooseMessages,
    Show,
    ShownMessage,
)
from warmprefix_tools.inputs import InputError, opened
from warmprefix_tools.report.amounts import counted

__all__ = ["DoctorError", "ReadLog", "read_log"]

_MAX_SKIPPED = 100
_MAX_REASON_LENGTH = 240
_MAX_FIELDS = 8
_CUT_PROMPTS = 3
"""If this many of the longest logged prompts have the same length, the logger probably cuts prompts."""
_ACCEPTED = (
    'Accepted are bodies of chat requests, {"messages": [...]}, one per line or in a JSON array; objects that contain'
    ' one, such as {"body": {...}}; bodies of other chat APIs, with "input", "system" or "contents"; spans of'
    " OpenTelemetry; exports of LangSmith and Langfuse; transcripts of Claude Code and Codex; and the log of vLLM."
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
        self.records = 0
        """Lines and values, readable or not."""
        self.others: Counter[str] = Counter()
        """Records of each format that are about something else than a prompt."""
        self._logged_ids: set[str] = set()
        self._logged: list[tuple[int, LogMessage]] = []
        """Length and last message of each prompt that was logged as text."""
        self._without_prompt = 0
        self._token_id_prompts = 0
        self._unanswered = 0
        self._usage: tuple[int, dict[str, Any]] = (-1, {})
        """A request, and what the latest records that answer it have reported."""
        self._requests_by_key: dict[str, int] = {}
        self._transcripts: dict[str, AgentTranscript] = {}
        self._transcript_turns: Counter[str] = Counter()

    def read(self, path: Path) -> None:
        name = str(path)
        try:
            with opened(path) as file:
                number = 0
                if file.is_json_document():
                    for number, value in file.json_values():
                        self._try(name, number, value)
                else:
                    for number, line in enumerate(file.lines(), 1):
                        self._try(name, number, line.decode("utf-8", "replace"))
                for kind, transcript in self._transcripts.items():
                    self._take_turns(name, number, kind, transcript.end(name))
        except InputError as error:
            place = name if error.line is None else f"{name}, line {error.line}"
            raise DoctorError(f"{place}: {error}.") from error.__cause__

    def add_notes(self) -> None:
        notes = self.result.notes
        log = self.result.log
        lengths = [length for length, _ in self._logged]
        longest = max(lengths, default=0)
        cut = lengths.count(longest)
        if cut >= max(_CUT_PROMPTS, len(lengths) // 10) and len(set(lengths)) > 1:
            log.cut.update(dict.fromkeys((message for length, message in self._logged if length == longest), ""))
            notes.append(
                f"{cut} logged prompts end after exactly {longest:,} characters: the logger seems to cut them"
                " (vLLM: --max-log-len). The text behind the cut is not examined."
            )
        marks = Counter[str]()
        for request in log.requests:
            marks.update({log.cut[message] for message in log.cut.keys() & request.messages})
        notes += [
            f"{counted(count, 'request')} of {len(log.requests)} have texts that were cut or masked in the log"
            f" ({mark}; {CUT_MARKS[mark]}). What differs there is not seen, so the figures may be wrong."
            for mark, count in marks.items()
            if mark
        ]
        for each in TRANSCRIPTS:
            if self._transcript_turns[each.name]:
                count = counted(self._transcript_turns[each.name], "request")
                notes.append(
                    f"{count} from transcripts of {each.name}, which lack {each.missing}:"
                    " only the engine's own count has these tokens."
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
        self.records += 1
        try:
            if isinstance(record, str):
                self._take_line(name, number, record)
            else:
                self._take_record(name, number, record)
        except (ValueError, RecursionError, SyntaxError) as error:
            self._skip(name, number, error)

    def _skip(self, name: str, number: int, error: Exception) -> None:
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
            records = json.loads(text)
            if all(map(LooseMessages.recognise, records)):
                records = [{"messages": records}]
            for record in records:
                self._try(name, number, record)
        elif text.startswith("{"):
            for record in _concatenated(text):
                self._try(name, number, record)
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
        transcript = next((each for each in TRANSCRIPTS if each.recognise(record)), None)
        if transcript is not None:
            self._take_turn(name, number, record, transcript.name, transcript.reader)
            return
        bodies = list(find_bodies(record))
        for found in bodies:
            self._take_body(name, number, found)
        if bodies:
            return
        key = next((str(record[name]) for name in KEYS if name in record), None)
        if key is not None or is_answer(record):
            self._take_answer(record, key)
        elif (form := format_of(record)) is not None:
            self.others[form.name] += 1
        elif LooseMessages.recognise(record):
            self._take_turn(name, number, record, "a conversation", LooseMessages)
        else:
            inner = record.get("message") or record.get("msg") or record.get("log")  # of a logger that writes JSON
            logged = parse_line(inner) if isinstance(inner, str) else None
            if logged is None:
                fields = ", ".join([*map(str, record)][:_MAX_FIELDS]) or "none"
                raise ValueError(f"it has neither messages nor a prompt; its fields are: {fields}")
            self._take_logged(name, number, logged)

    def _take_body(self, name: str, number: int, found: FoundBody | UnreadableRecordError) -> None:
        try:
            if isinstance(found, UnreadableRecordError):
                raise found
            requests = list(self._prompts(name, number, found))
        except ValueError as error:
            self._skip(name, number, error)
            return
        for request in requests:
            if found.key is not None:
                self._requests_by_key[found.key] = len(self.result.log.requests)
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

    def _take_turn(
        self, name: str, number: int, record: Mapping[str, Any], kind: str, reader: Callable[[Show], AgentTranscript]
    ) -> None:
        transcript = self._transcripts.setdefault(kind, reader(self._shown))
        self._take_turns(name, number, kind, transcript.take(record, name))

    def _take_turns(self, name: str, number: int, kind: str, turns: Iterator[LoggedTurn]) -> None:
        for turn in turns:
            if not turn.messages:
                continue
            self._transcript_turns[kind] += 1
            tokens = token_usage(turn.usage)
            self.result.log.requests.append(
                LogRequest(
                    name,
                    number,
                    tuple(message for message, _ in turn.messages),
                    model=turn.model if isinstance(turn.model, str) else None,
                    session=turn.session,
                    reported_prompt_tokens=tokens.prompt_tokens,
                    reported_cached_tokens=tokens.cached_tokens,
                    seconds=turn.seconds,
                    part_ends=tuple(ends for _, ends in turn.messages),
                )
            )

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

    def _shown(self, body: Mapping[str, object]) -> list[ShownMessage]:
        """Return the messages of a body in the log, each with the ends of its parts."""
        return [self._shown_message(message) for message in body_messages(body)]

    def _shown_message(self, message: BodyMessage) -> ShownMessage:
        ends = [end - 1 for end in accumulate([len(part.text) + 1 for part in message.parts])]
        text = "\n".join([part.text for part in message.parts])
        return self.result.log.message(message.role, text), tuple(ends)

    def _chat(self, name: str, number: int, body: Mapping[str, object]) -> LogRequest:
        messages, tools = body_messages(body), tool_parts(body)
        shown = [self._shown_message(message) for message in messages]
        parts = [message.parts for message in messages]
        if tools:
            ends = tuple(accumulate([len(part.text) + len("[,") for part in tools]))
            shown.insert(0, (self.result.log.tools([tool.text for tool in tools]), ends))
            parts.insert(0, tuple(tools))
        marks = [
            LogMark(at, end, part.lifetime)
            for at, (of_message, (_, ends)) in enumerate(zip(parts, shown, strict=True))
            for part, end in zip(of_message, ends, strict=True)
            if part.marked
        ]
        front = len(shown) - sum(message.in_list for message in messages)
        prompt, part_ends = zip(*shown, strict=True)
        return LogRequest(name, number, prompt, front=front, part_ends=part_ends, marks=tuple(marks))

    def _take_logged(self, name: str, number: int, logged: LoggedPrompt) -> None:
        if logged.id in self._logged_ids:  # vLLM may log one request twice, in full and in short
            return
        if logged.text is not None:
            messages = self._rendered(logged.text)
            self._logged.append((len(logged.text), messages[-1]))
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

    def _take_answer(self, record: object, key: str | None = None) -> None:
        requests = self.result.log.requests
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
