"""Public data sets as traces: fetched once from a server, with checked sums and their licence."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import fetch_traces
import plugin_hit_ratio
from fetch_traces import SOURCES, FetchError, File, Source, make
from traces import files
from warmprefix_tools.traces.reader import read_trace


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode() + b"\n"


def logged(timestamp: int, session: str, *passages: int) -> dict[str, object]:
    hash_ids = {"sys_prompt": [9], "passages_ids": passages, "history": [], "web_search": [], "user_input": [8]}
    return {"timestamp": str(timestamp), "input_length": 99, "hash_ids": hash_ids, "session_id": session}


def asked(question: str, answer: str) -> dict[str, object]:
    return {"id": "1", "question": question, "answers": [{"answer_start": 0, "text": answer}]}


SKY = {"context": "Planets shine.", "qas": [asked("Who is it?", "Planets")]}

# These have the form of the real files.
FILES = {
    "2_passages.jsonl": lines(*[{"passage_id": number, "token_length": 100 + number} for number in range(7)]),
    "0_trace.jsonl": lines(
        logged(30, "b", 1, 2, 3), logged(7, "a", 4, 2, 4, 1), logged(8, "a", 1, 2), logged(40, "b", 3, 1, 2)
    ),
    "xquad.en.json": json.dumps(
        {
            "data": [
                {
                    "title": "Sea",
                    "paragraphs": [
                        {"context": "The sea is deep and salty.", "qas": [asked("How deep is the sea?", "deep")]},
                        {"context": "Whales live in the sea.", "qas": [asked("Where do whales live?", "the sea")]},
                    ],
                },
                {
                    "title": "Sky",
                    "paragraphs": [SKY],
                },
            ],
            "version": "1.1",
        }
    ).encode(),
    "NQ-open.dev.jsonl": lines(
        {"question": "when was the last time anyone was on the moon", "answer": ["December 1972", "1972"]},
        {"question": "who was the first man on the moon", "answer": ["Neil Armstrong"]},
    ),
}


class Host:
    """A server that finds files by the last part of their path, and counts requests."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.asked: list[str] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.asked.append(self.path)
                data = host.files.get(self.path.rpartition("/")[2])
                self.send_response(200 if data is not None else 404)
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class has this name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def host() -> Iterator[Host]:
    served = Host()
    thread = Thread(target=served.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()


def small(name: str) -> Source:
    """Return a source whose files are the small ones, with their sums."""
    source = SOURCES[name]
    sums = [hashlib.sha256(FILES[file.path.rpartition("/")[2]]).hexdigest() for file in source.files]
    return source._replace(
        files=tuple(File(file.path, sum) for file, sum in zip(source.files, sums, strict=True))  # noqa: A001
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_trace_names_its_source_and_licence(host: Host, tmp_path: Path, name: str) -> None:
    path = make(small(name), tmp_path / "traces", host.url)
    trace = read_trace(path)
    assert (trace.name, trace.header["licence"], trace.header["source"]) == (
        name,
        SOURCES[name].licence,
        SOURCES[name].origin,
    )
    assert set(trace.tokens) == {block for request in trace.requests for block in request.blocks}
    assert host.asked == [f"/{file.path}" for file in SOURCES[name].files]
    before = path.read_bytes()
    path.unlink()
    assert make(small(name), tmp_path / "traces", "http://127.0.0.1:9").read_bytes() == before, "from what was kept"


def test_the_services_requests_come_in_order_of_arrival(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("ragpulse_rag"), tmp_path, host.url))
    assert [request.blocks for request in trace.requests] == [(4, 2, 1), (1, 2, 3), (3, 1, 2)]
    assert [request.conversation for request in trace.requests] == [0, 1, 1]
    assert trace.tokens == {number: 100 + number for number in (1, 2, 3, 4)}
    assert trace.k == 7


def test_questions_find_their_texts(host: Host, tmp_path: Path) -> None:
    found = read_trace(make(small("xquad_en"), tmp_path, host.url))
    assert [request.blocks for request in found.requests] == [(0, 1), (1,), ()]
    records = read_trace(make(small("nq_open_records"), tmp_path, host.url))
    assert [request.blocks[0] for request in records.requests] == [0, 1]


def test_texts_are_written_for_the_benchmarks_that_read_them(host: Host, tmp_path: Path) -> None:
    make(small("xquad_en"), tmp_path, host.url)
    with gzip.open(tmp_path / plugin_hit_ratio.BUNDLE, "rt", encoding="utf-8") as file:
        about, *records = map(json.loads, file)
    assert about["licence"] == "CC BY-SA 4.0"
    assert [record["text"] for record in records if "block" in record][1] == "Whales live in the sea."
    assert [record for record in records if "query" in record][1] == {
        "query": 1,
        "text": "Where do whales live?",
        "answers": ["the sea"],
        "gold": [1],
    }
    assert [path.name for path in files([tmp_path])] == ["xquad_en.jsonl.gz"], "a bundle of texts is no trace"


def test_another_file_than_expected_is_refused(host: Host, tmp_path: Path) -> None:
    host.files["xquad.en.json"] += b" "
    with pytest.raises(FetchError, match=r"xquad.en.json has the SHA-256 sum [0-9a-f]{64}, not [0-9a-f]{64}"):
        make(small("xquad_en"), tmp_path, host.url)
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize("url", [lambda host: host.url, lambda host: "http://127.0.0.1:9"])
def test_a_missing_file_or_server_is_reported(host: Host, tmp_path: Path, url: Callable[[Host], str]) -> None:
    host.files.clear()
    with pytest.raises(FetchError, match="could not be fetched"):
        make(small("nq_open_records"), tmp_path, url(host))


def test_the_sums_and_commits_are_whole() -> None:
    for source in SOURCES.values():
        for file in source.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert len(bytes.fromhex(file.path.split("/")[2])) == 20


def test_the_list_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_traces.py", "--list", "--folder", str(tmp_path / "traces")])
    fetch_traces.main()
    printed = capsys.readouterr().out
    assert all(source.licence in printed and name in printed for name, source in SOURCES.items())
    assert not list(tmp_path.iterdir())
