"""What PageIndex computes with and without our plugin: its own agent on a document of its own, over HTTP.

    python benchmarks/pageindex_questions.py

The document is a PDF of docstrings of the Python standard library, which PageIndex indexes itself. Six questions of one
user of the demo are asked, each in a chat of its own by `client.chat`, and all in one conversation of the OpenAI Agents
SDK. The model is a script: it asks for the tree unless that stands in front of it, then for three pages that a lexical
search finds, then it answers. Usage is that of an emulated engine, which sees each prompt. Needs the extra `pageindex`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import textwrap
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table
from result_files import write_results
from warmprefix import ContextBlock
from warmprefix_pageindex import pages_once, tree_instructions
from warmprefix_tools.demo.corpus import LibraryEntry, read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

PACKAGES = ("asyncio.", "concurrent.", "http.", "json", "logging", "unittest.")
LINES = 40
"""Lines per page."""
QUESTIONS = 6
PAGES = 3
"""Pages that the model reads for each question."""
CONFIG = EmulatorConfig(kv_blocks=40_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
MODEL = f"openai/{CONFIG.model}"
ANSWER = {"role": "assistant", "content": "It is in the standard library."}


class Page(NamedTuple):
    """A page of a PDF."""

    heading: str
    """Also its entry in the outline; empty for a page that continues a section."""
    lines: Sequence[str]


class ScriptedEngine:
    """An OpenAI-compatible endpoint with an emulated engine behind it; the messages of its answers are scripted."""

    def __init__(self) -> None:
        self.script: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.calls = self.prompt_tokens = self.cached_tokens = 0

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve from threads, and yield the base URL."""
        with EmulatorServer(CONFIG) as emulator:
            engine = self

            class Handler(BaseHTTPRequestHandler):
                def do_POST(self) -> None:
                    body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                    answer = json.dumps(engine.answer(body, emulator.base_url)).encode()
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

                def log_message(self, *_: object) -> None:
                    pass

            with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
                threading.Thread(target=server.serve_forever, daemon=True).start()
                try:
                    yield f"http://127.0.0.1:{server.server_port}/v1"
                finally:
                    server.shutdown()

    def answer(self, body: dict[str, Any], base_url: str) -> dict[str, Any]:
        """Return the emulator's answer with the next message of the script."""
        self.bodies.append(body)
        data = json.dumps({"max_tokens": 16, **body}).encode()
        request = urllib.request.Request(
            f"{base_url}/chat/completions", data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        if body.get("tools") and self.script:
            message = self.script.pop(0)
            reason = "tool_calls" if "tool_calls" in message else "stop"
            answer["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        self.calls += 1
        self.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer


def main() -> None:
    """Measure all arms, print them and write them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    entries = [entry for entry in read_standard_library() if f"{entry.module}.".startswith(PACKAGES)]
    pages = pages_of(entries)
    with tempfile.TemporaryDirectory() as folder:
        document = index_document(Path(folder), pages)
        questions = questions_of_one_user(entries)
        found = [picked_pages(pages, query) for _, query in questions]
        rows: list[dict[str, Any]] = []
        for shape, arms in (("chats", ("", "tree")), ("conversation", ("", "tree", "tree, pages"))):
            for arm in arms:
                engine = ScriptedEngine()
                with engine.serving() as base_url:
                    ask_all(engine, base_url, Path(folder), document, shape, arm, questions, found)
                rows.append(
                    {
                        "shape": shape,
                        "plugin": arm,
                        "document_pages": len(pages),
                        "questions": len(questions),
                        "model_calls": engine.calls,
                        "prompt_tokens": engine.prompt_tokens,
                        "computed_tokens": engine.prompt_tokens - engine.cached_tokens,
                    }
                )
    for row in rows:
        first = next(each for each in rows if each["shape"] == row["shape"])
        row["computed_change"] = round(row["computed_tokens"] / first["computed_tokens"] - 1, 3)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_results("pageindex_questions", rows)


def ask_all(
    engine: ScriptedEngine,
    base_url: str,
    folder: Path,
    document: str,
    shape: str,
    arm: str,
    questions: Sequence[tuple[str, str]],
    found: Sequence[str],
) -> None:
    """Ask all questions, in chats of their own or in one conversation."""
    import agents

    client = client_of(base_url, folder)
    name = client.get_document(document)["name"]
    instructions = tree_instructions(client, document) if "tree" in arm else ""
    agents.set_tracing_disabled(True)
    config = client.openai_agent_config()
    config["model"] = chat_model(base_url)
    config["instructions"] = "\n\n".join(filter(None, (config["instructions"], instructions)))
    run_config = agents.RunConfig(call_model_input_filter=pages_once if "pages" in arm else None)
    history: list[Any] = [{"role": "user", "content": client.document_context(document)}]
    for number, ((question, _), picked) in enumerate(zip(questions, found, strict=True)):
        is_first = shape == "chats" or number == 0
        if not instructions and is_first:
            engine.script.append(called(f"tree-{number}", "get_document_structure", doc_name=name))
        engine.script += [called(f"pages-{number}", "get_page_content", doc_name=name, pages=picked), ANSWER]
        if shape == "chats":
            client.chat(question, doc_id=document, instructions=instructions or None)
        else:
            agent = agents.Agent(**config)
            run = agents.Runner.run_sync(
                agent, [*history, {"role": "user", "content": question}], run_config=run_config
            )
            history = run.to_input_list()


def called(call_id: str, tool: str, **arguments: str) -> dict[str, Any]:
    """Return the message of a model that calls a tool."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def chat_model(base_url: str) -> Any:
    """Return a model of the Agents SDK."""
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return OpenAIChatCompletionsModel(model=CONFIG.model, openai_client=AsyncOpenAI(base_url=base_url, api_key="none"))


# -- the document ------------------------------------------------------------------------------------------------------


def client_of(base_url: str, folder: Path) -> Any:
    """Return a PageIndex client with its documents in a folder."""
    import pageindex

    backend = {"api_base": base_url, "api_key": "none"}
    index = {"model": MODEL, "backend": backend, "storage_path": str(folder / "store"), "optimize": "off"}
    return pageindex.PageIndexClient(index=index, chat={"model": MODEL, "backend": backend})


def index_document(folder: Path, pages: Sequence[Page]) -> str:
    """Let PageIndex index a PDF, with summaries of the emulator; return the id of the document."""
    write_pdf(folder / "library.pdf", pages)
    with EmulatorServer(CONFIG) as emulator:
        document: str = client_of(emulator.base_url, folder).submit_document(str(folder / "library.pdf"))["doc_id"]
    return document


def pages_of(entries: Sequence[LibraryEntry]) -> list[Page]:
    """Return the docstrings as pages: a section per module."""
    pages: list[Page] = []
    for module, members in groupby(sorted(entries, key=lambda entry: entry.module), lambda entry: entry.module):
        text = "\n\n".join(block.text for entry in members for block in entry.blocks)
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 95) or [""]]
        headings = [f"The module {module}"] + [""] * len(lines)
        pages += [Page(headings[at], lines[at : at + LINES]) for at in range(0, len(lines), LINES)]
    return pages


def questions_of_one_user(entries: Sequence[LibraryEntry]) -> list[tuple[str, str]]:
    """Return questions as typed, and as a search would get them."""
    asked = list(ask(entries, 400, seed=0))
    users = [question.user for question in asked]
    user = max(sorted(set(users)), key=users.count)
    return [(question.text, question.query) for question in asked if question.user == user][:QUESTIONS]


def picked_pages(pages: Sequence[Page], query: str) -> str:
    """Return the pages that a lexical search finds, as PageIndex's tool takes them."""
    blocks = [ContextBlock("\n".join(page.lines) or "-", id=str(number)) for number, page in enumerate(pages, 1)]
    found = Bm25Retriever(blocks).retrieve(query, PAGES)
    return ",".join(map(str, sorted(int(block.id or 0) for block in found)))


def write_pdf(path: Path, pages: Sequence[Page]) -> None:
    """Write a PDF with an outline of the headings."""
    first, outline = 5, 5 + 2 * len(pages)
    headings = [(number, page.heading) for number, page in enumerate(pages) if page.heading]
    kids = " ".join(f"{first + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R /Outlines {outline} 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Courier >>",
    ]
    for number, page in enumerate(pages):
        lines = "\n".join(f"({_escaped(line)}) Tj T*" for line in page.lines)
        text = f"BT /F1 18 Tf 40 760 Td ({_escaped(page.heading)}) Tj ET\nBT /F2 9 Tf 40 730 Td 12 TL\n{lines}\nET"
        fonts = "/Resources << /Font << /F1 3 0 R /F2 4 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {fonts} /Contents {first + 2 * number + 1} 0 R >>"
        )
        objects.append(f"<< /Length {len(text)} >>\nstream\n{text}\nendstream")
    objects.append(f"<< /First {outline + 1} 0 R /Last {outline + len(headings)} 0 R /Count {len(headings)} >>")
    for place, (number, heading) in enumerate(headings):
        before = f"/Prev {outline + place} 0 R" if place else ""
        after = f"/Next {outline + place + 2} 0 R" if place + 1 < len(headings) else ""
        target = f"/Parent {outline} 0 R /Dest [{first + 2 * number} 0 R /Fit]"
        objects.append(f"<< /Title ({_escaped(heading)}) {target} {before} {after} >>")
    data = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    path.write_bytes(data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode())


def _escaped(text: str) -> str:
    plain = text.encode("latin-1", "replace").decode("latin-1")
    return plain.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


if __name__ == "__main__":
    main()
