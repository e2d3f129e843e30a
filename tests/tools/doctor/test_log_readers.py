"""Reading logs: bodies, records of proxies, streams, and vLLM's own lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.doctor.log_reader import DoctorError, ReadLog, read_log
from warmprefix_tools.doctor.request_log import PLAIN, TOOLS, LogRequest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What are tides?"}]
BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES}
TEXTS = [("system", "Be brief."), ("user", "What are tides?")]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
USAGE = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def run(*lines: Any) -> ReadLog:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / "log").write_text(text, encoding="utf-8")
        return read_log([tmp_path / "log"])

    return run


def texts(result: ReadLog, request: int = 0) -> list[tuple[str, str]]:
    return [(message.role, result.log.text(message)) for message in result.log.requests[request].messages]


def only(result: ReadLog) -> LogRequest:
    (request,) = result.log.requests
    assert (result.skipped, result.skipped_lines) == ([], 0)
    return request


@pytest.mark.parametrize(
    "record",
    [
        BODY,
        {"request": BODY},
        {"body": BODY},
        {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"request": {"url": "/v1/chat/completions", "body": json.dumps(BODY)}, "response": {"choices": []}},
        {"level": "info", "request_body": json.dumps(BODY)},
        # LiteLLM: the standard payload, the arguments of a callback, a row of its spend logs
        {
            "id": "x",
            "call_type": "acompletion",
            "model": "m",
            "messages": MESSAGES,
            "model_parameters": {"stream": True},
        },
        {"model": "m", "messages": json.dumps(MESSAGES), "metadata": {"user_api_key_hash": "x"}},
        {"model": "m", "messages": [], "litellm_params": {"proxy_server_request": {"headers": {}, "body": BODY}}},
        {"request_id": "x", "model": "m", "messages": {}, "proxy_server_request": BODY},
        {"standard_logging_object": BODY},
    ],
)
def test_body_is_found_in_any_wrapper(read: Any, record: dict[str, Any]) -> None:
    result = read(record)
    assert only(result).model == "m"
    assert texts(result) == TEXTS


@pytest.mark.parametrize(
    "record",
    [
        {"input": MESSAGES},
        {"input": {"messages": MESSAGES}, "output": {"role": "assistant", "content": "Water."}},
        {"input": json.dumps(MESSAGES)},
        {"input": json.dumps({"messages": MESSAGES})},
    ],
)
def test_input_of_an_export_is_a_request(read: Any, record: dict[str, Any]) -> None:
    result = read({**record, "id": "x", "type": "GENERATION", "sessionId": "s", "userId": "u"})
    assert texts(result) == TEXTS
    assert (only(result).session, only(result).user) == ("s", "u")


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("record", [BODY, {"input": MESSAGES}])
def test_each_element_of_an_array_is_a_request(tmp_path: Path, record: dict[str, Any], indent: int | None) -> None:
    records = [record, {"model": "m"}, record]
    path = tmp_path / "export.json"
    path.write_text(json.dumps(records, indent=indent))
    result = read_log([path])
    assert [texts(result, number) for number in range(2)] == [TEXTS, TEXTS]
    (skipped,) = result.skipped
    assert skipped.reason == "it has neither messages nor a prompt; its fields are: model"
    if indent is not None:
        assert '"model": "m"' in path.read_text().splitlines()[skipped.line]


def test_sender_is_read_from_any_usual_field(read: Any) -> None:
    metadata = {"session_id": "s", "user_api_key_team_id": "acme"}
    request = only(read({**BODY, "end_user": "ann", "cache_salt": "x", "metadata": metadata}))
    assert (request.session, request.user, request.tenant, request.salt) == ("s", "ann", "acme", "x")
    nested = {"model": "m", "messages": MESSAGES, "extra_body": {"cache_salt": "y"}, "metadata": {"tenant": 7}}
    request = only(read({"request": nested}))
    assert (request.session, request.user, request.tenant, request.salt) == (None, None, "7", "y")


def test_tools_open_the_prompt_as_in_the_emulator(read: Any) -> None:
    expected = [(TOOLS, json.dumps([TOOL, TOOL])), *TEXTS]
    assert texts(read({**BODY, "tools": [TOOL, TOOL]})) == expected
    assert texts(read({**BODY, "optional_params": {"tools": [TOOL, TOOL]}})) == expected
    assert texts(read({**BODY, "functions": [TOOL["function"]]})) == [(TOOLS, json.dumps([TOOL])), *TEXTS]


def test_parts_and_tool_calls_are_text_and_pictures_are_placeholders(read: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What is"}, picture, {"type": "text", "text": "this?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "A tide."},
    ]
    (_, question), answer, result = texts(read({"messages": messages}))
    assert question.startswith("What is\n<image_url of 100")
    assert question.endswith(">\nthis?")
    assert len(question) < 100
    assert answer == ("assistant", f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert result == ("tool", "A tide.")
    other = {**picture, "image_url": {"url": "data:image/png;base64," + "B" * 100_000}}
    messages[0]["content"] = [other]
    assert texts(read({"messages": messages}))[0][1] not in question


def test_answer_gives_the_usage_of_the_request_before_it(read: Any) -> None:
    chunk = {"object": "chat.completion.chunk", "choices": [{"delta": {"content": "The"}}]}
    last = {"object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    streamed = read(
        BODY, f"data: {json.dumps(chunk)}", "", f"data: {json.dumps(last)}", "data: [DONE]", BODY, last, BODY
    )
    assert [request.reported_cached_tokens for request in streamed.log.requests] == [32, 32, None]
    assert streamed.skipped_lines == 0
    for record in (
        {"request": BODY, "response": {"usage": USAGE}},
        {"request": BODY, "response": {"status_code": 200, "body": {"usage": USAGE}}},
        {"request": BODY, "chunks": [chunk, last]},
        {"request": BODY, "chunks": [f"data: {json.dumps(last)}"]},
        {**BODY, "usage": USAGE},
    ):
        request = only(read(record))
        assert (request.reported_prompt_tokens, request.reported_cached_tokens) == (40, 32)


def test_prompts_without_messages_are_read(read: Any) -> None:
    assert texts(read({"model": "m", "prompt": "Once upon"})) == [(PLAIN, "Once upon")]
    assert [texts(read({"prompt": ["one", "two"]}), i) for i in (0, 1)] == [[(PLAIN, "one")], [(PLAIN, "two")]]
    result = read({"prompt": [1, 2, 3]}, {"prompt": [[1, 2, 3], [4]]})
    pool = result.log.pool
    lengths = [pool.count_tokens(request.messages[0].ids) for request in result.log.requests]
    assert lengths == [3, 3, 1]
    assert "3 requests logged as token ids" in result.notes[0]


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat are tides?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nWhat are tides?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
PARAMS = "SamplingParams(n=1, temperature=0.7, stop=['prompt: '], max_tokens=10)"


@pytest.mark.parametrize("prompt", [CHATML, LLAMA])
@pytest.mark.parametrize(
    "line",
    [
        "INFO 04-01 10:00:00 async_llm_engine.py:529] Received request cmpl-1: prompt: {prompt!r}, sampling_params: "
        "{params}, prompt_token_ids: [1, 2], lora_request: None.",
        "INFO 02-14 05:41:15 logger.py:39] Received request chatcmpl-1: prompt: {prompt!r}, params: {params}, "
        "prompt_token_ids: None, lora_request: None, prompt_adapter_request: None.",
        "(APIServer pid=1) INFO 11-05 12:39:35 [logger.py:40] Received request chatcmpl-1: prompt: {prompt!r}, params: "
        "{params}, prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.",
        "DEBUG 12-01 08:00:00 [logger.py:50] Request chatcmpl-1 details: prompt: {prompt!r}, prompt_token_ids: [5, 6], "
        "prompt_embeds shape: None.",
        "INFO 12-01 08:00:00 [logger.py:60] Received request chatcmpl-1: params: {params}, lora_request: None, "
        "prompt: {prompt!r}.",
        '{{"severity": "INFO", "message": "Received request chatcmpl-1: prompt: {escaped}, params: None"}}',
    ],
)
def test_log_of_vllm_is_read(read: Any, line: str, prompt: str) -> None:
    escaped = json.dumps(repr(prompt))[1:-1]
    result = read(line.format(prompt=prompt, params=PARAMS, escaped=escaped), "INFO:     Application startup complete.")
    only(result)
    assert texts(result) == TEXTS


def test_vllm_requests_count_once_and_only_with_their_prompt(read: Any) -> None:
    result = read(
        f"DEBUG [logger.py:50] Request c-1 details: prompt: {CHATML!r}, prompt_token_ids: None.",
        f"INFO [logger.py:60] Received request c-1: params: {PARAMS}, lora_request: None.",
        f"INFO [logger.py:60] Received request c-2: prompt: None, params: {PARAMS}, prompt_token_ids: [7, 8, 9].",
        f"INFO [logger.py:60] Received request c-3: params: {PARAMS}, lora_request: None.",
    )
    assert len(result.log.requests) == 2
    assert any("1 request logged without a prompt" in note for note in result.notes)


def test_unreadable_records_are_skipped_with_a_reason(read: Any) -> None:
    result = read(
        "{",
        BODY,
        "[1, 2]",
        {"model": "m"},
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"prompt": [True, {}]},
        "data: {",
        "INFO x] Received request c-1: prompt: 'cut o",
        "some prose",
    )
    assert len(result.log.requests) == 1
    assert result.skipped_lines == 10
    assert [skipped.line for skipped in result.skipped] == [1, *range(3, 12)]
    reasons = " | ".join(skipped.reason for skipped in result.skipped)
    for part in (
        "Expecting",
        "not a JSON object",
        "neither messages nor a prompt",
        "is empty",
        "has no role",
        "is int, neither",
    ):
        assert part in reasons


def test_list_of_skipped_records_is_bounded(read: Any) -> None:
    result = read(BODY, *["{"] * 500)
    assert (len(result.skipped), result.skipped_lines) == (100, 500)


@pytest.mark.parametrize("content", [None, b"", b"prose\n", b"\x1f\x8b not gzip", b'{"model": "m"}\n'])
def test_file_without_any_request_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "log.jsonl.gz"
    if content is not None:
        path.write_bytes(content if content.startswith(b"\x1f") else gzip.compress(content))
    with pytest.raises(DoctorError, match=r"log\.jsonl\.gz"):
        read_log([path])
