"""The filter function in a real Open WebUI, looked at in a browser: citations that point to the right documents.

    python run.py test --all open-webui

`benchmarks/open_webui.py` writes its figures

A knowledge base has real documents. Each question asks for one of their sentences. The engine is emulated; it reads
the prompt alone, finds the sentence in one of the sources, and cites that source by the number that it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import uvicorn
from tests.tools.report.conftest import BROWSERS, Browser

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parents[2]
PROGRAM = os.environ.get("WARMPREFIX_OPEN_WEBUI") or shutil.which("open-webui", path=ROOT / ".venv-open-webui" / "bin")
QUESTIONS = 50
DIMENSIONS = 4_096
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_EMBEDDING_MODEL": "words",
    "RAG_TOP_K": "8",
    "RAG_EMBEDDING_BATCH_SIZE": "64",
    "OFFLINE_MODE": "True",
    "ENABLE_PIP_INSTALL_FRONTMATTER_REQUIREMENTS": "False",  # it is installed already
    "ENABLE_VERSION_UPDATE_CHECK": "False",
    "ENABLE_RETRIEVAL_QUERY_GENERATION": "False",
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
    "ANONYMIZED_TELEMETRY": "False",
    "SCARF_NO_ANALYTICS": "true",
    "DO_NOT_TRACK": "true",
}


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def answer(messages: Sequence[Any]) -> str:
    """Answer as a model that reads nothing but the prompt."""
    prompt = str(messages[-1].text)
    asked = words(prompt[prompt.rindex("Which page says:") :].partition(":")[2])
    for source in re.finditer(r'<source id="(\d+)"[^>]*>(.*?)</source>\n?', prompt, re.DOTALL):
        if asked in words(source[2]):
            return f"It is written here [{source[1]}], and nowhere else."
    return "I do not know."


class Embeddings:
    """An application with OpenAI's route for embeddings: counts of words, hashed."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        pieces = []
        while True:
            message = await receive()
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        given = json.loads(b"".join(pieces))["input"]
        texts = [given] if isinstance(given, str) else given
        data = [{"object": "embedding", "index": i, "embedding": vector(text)} for i, text in enumerate(texts)]
        body = json.dumps({"object": "list", "model": "words", "data": data, "usage": {"prompt_tokens": 0}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@cache
def places_of_words() -> Counter[str]:
    """Return in how many lines of the documents each word stands."""
    lines = [line for path in DOCUMENTS for line in path.read_text("utf-8").splitlines()]
    return Counter(word for line in lines for word in set(words(line).split()))


def vector(text: str) -> list[float]:
    counts = [0.0] * DIMENSIONS
    for word in set(words(text).split()):
        place = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=2).digest(), "big") % DIMENSIONS
        counts[place] += math.log(4_000 / (1 + places_of_words()[word]))
    length = math.hypot(*counts) or 1.0
    return [count / length for count in counts]


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


class OpenWebUI:
    """One running Open WebUI, as its administrator."""

    def __init__(self, folder: Path, engine: str, embeddings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
        environment |= {**SETTINGS, "HOME": str(folder), "DATA_DIR": str(folder / "data")}
        environment |= {"OPENAI_API_BASE_URL": engine, "RAG_OPENAI_API_BASE_URL": f"{embeddings}/v1"}
        environment |= {"RAG_OPENAI_API_KEY": "none"}
        assert PROGRAM is not None
        self._log = (folder / "log").open("wb")
        command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self._log, stderr=self._log)
        self.token = ""

    def wait(self) -> None:
        """Wait until it answers, and sign in."""
        deadline = time.monotonic() + 240
        while True:
            try:
                signed_in = self.call("POST", "/api/v1/auths/signin", {"email": "", "password": ""})
                break
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, Path(self._log.name).read_text()[-3_000:]
                assert time.monotonic() < deadline
                time.sleep(1)
        self.token = signed_in["token"]

    def call(self, method: str, path: str, value: object = None, data: bytes | None = None, kind: str = "") -> Any:
        headers = {"content-type": kind or "application/json", "authorization": f"Bearer {self.token}"}
        body = json.dumps(value).encode() if data is None and value is not None else data
        request = urllib.request.Request(f"{self.url}{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"null")

    def add_file(self, path: Path) -> str:
        mark = "a-mark-between-parts"
        head = f'--{mark}\r\ncontent-disposition: form-data; name="file"; filename="{path.name}"\r\n'
        body = (
            f"{head}content-type: text/markdown\r\n\r\n".encode() + path.read_bytes() + f"\r\n--{mark}--\r\n".encode()
        )
        kind = f"multipart/form-data; boundary={mark}"
        return str(self.call("POST", "/api/v1/files/?process_in_background=false", data=body, kind=kind)["id"])

    def prepare(self, model: str) -> None:
        """Add a knowledge base with all documents, and a model that always gets passages of it."""
        base = self.call("POST", "/api/v1/knowledge/create", {"name": "docs", "description": "documentation"})
        for path in DOCUMENTS:
            self.call("POST", f"/api/v1/knowledge/{base['id']}/file/add", {"file_id": self.add_file(path)})
        about = {"id": "reader", "base_model_id": model, "name": "reader", "params": {"function_calling": "legacy"}}
        self.call("POST", "/api/v1/models/create", {**about, "meta": {"knowledge": [{**base, "type": "collection"}]}})
        version = self.call("GET", "/api/version")["version"]  # no news of it in front of the page
        self.call("POST", "/api/v1/users/user/settings/update", {"ui": {"version": version, "showChangelog": False}})

    def install(self) -> None:
        """Install the filter as its page says, for all models."""
        content = (ROOT / "integrations" / "plugins" / "open_webui" / "function.py").read_text("utf-8")
        about = {"id": "warmprefix", "name": "warmprefix", "content": content, "meta": {"description": "order"}}
        self.call("POST", "/api/v1/functions/create", about)
        self.call("POST", "/api/v1/functions/id/warmprefix/toggle")
        self.call("POST", "/api/v1/functions/id/warmprefix/toggle/global")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def questions() -> list[tuple[str, str]]:
    """Return different sentences that stand in one place of the documents, each with the name of its file."""
    rng = random.Random(7)
    texts = {path.name: words(path.read_text("utf-8")) for path in DOCUMENTS}
    lines = [
        (line, path.name)
        for path in DOCUMENTS
        for line in path.read_text("utf-8").splitlines()
        if re.fullmatch(r"[A-Z][\w ,.:;'()-]{50,}", line)
        and sum(text.count(words(line)) for text in texts.values()) == 1
    ]
    return rng.sample(lines, QUESTIONS)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    named = os.environ.get("WARMPREFIX_BROWSER")
    program = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if program is None:
        pytest.skip("no browser")
    driven = Browser(program, tmp_path_factory.mktemp("browser"))
    yield driven
    driven.close()


SEND = "document.querySelector('#send-message-button:not([disabled])')?.click()"
SHOWN = """
[...document.querySelectorAll('.chat-assistant')].map(answer => ({
    asked: [...document.querySelectorAll('.chat-user')].map(question => question.innerText).join(),
    text: answer.innerText,
    cited: [...answer.querySelectorAll('.markdown-prose button')].map(button => button.innerText.trim())}))
"""


def ask(browser: Browser, url: str, sentence: str) -> list[str]:
    """Ask in a new chat; return the names that the citations of its answer show."""
    question = quote(f"Which page says: {sentence}")
    browser.call("Page.navigate", url=f"{url}/?models=reader&q={question}")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        browser.evaluate(SEND)
        shown = browser.evaluate(SHOWN)
        if not shown or words(sentence) not in words(shown[-1]["asked"]):  # the page of the last chat is still there
            continue
        if shown[-1]["cited"] or "do not know" in shown[-1]["text"]:
            return list(shown[-1]["cited"])
    return []


def counted(engine: EmulatorServer) -> tuple[int, int]:
    """Return the prompt tokens that the engine has been asked, and those of them that it held."""
    with urllib.request.urlopen(f"{engine.url}/metrics") as response:
        text = response.read().decode()
    asked, held = (
        sum(float(value) for value in re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.MULTILINE))
        for name in ("queries", "hits")
    )
    return int(asked), int(held)


class Arm(NamedTuple):
    """What came of all questions, each in a chat of its own."""

    installed: bool
    questions: int
    wrong: tuple[str, ...]
    """Answers that do not have one citation, of the document that holds the sentence."""
    prompt_tokens: int
    cached_tokens: int


def measured(browser: Browser, folder: Path) -> Iterator[Arm]:
    """Yield what comes of the same questions without the filter, and with it."""
    config = EmulatorConfig(kv_blocks=4_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    asked = questions()
    with EmulatorServer(config, reader=answer) as engine, served(Embeddings()) as embeddings:
        web = OpenWebUI(folder, engine.base_url, embeddings)
        try:
            web.wait()
            web.prepare(config.model)
            for installed in (False, True):
                if installed:
                    web.install()
                urllib.request.urlopen(urllib.request.Request(f"{engine.url}/reset_prefix_cache", method="POST"))
                before = counted(engine)
                cited = [ask(browser, web.url, sentence) for sentence, _ in asked]
                wrong = [
                    f"{sentence!r}: {names} in place of {name}"
                    for names, (sentence, name) in zip(cited, asked, strict=True)
                    if names != [shown_name(name)]
                ]
                tokens, held = (after - earlier for after, earlier in zip(counted(engine), before, strict=True))
                yield Arm(installed, len(asked), tuple(wrong), tokens, held)
        finally:
            web.close()


@pytest.mark.skipif(PROGRAM is None, reason="there is no open-webui")
def test_citations_point_to_the_right_documents_and_more_is_cached(browser: Browser, tmp_path: Path) -> None:
    without, with_filter = measured(browser, tmp_path)
    assert not without.wrong
    assert not with_filter.wrong
    assert "stays as it is" not in (tmp_path / "log").read_text("utf-8", "replace")  # what the filter warns of
    assert with_filter.cached_tokens / with_filter.prompt_tokens > 1.2 * without.cached_tokens / without.prompt_tokens


def shown_name(name: str) -> str:
    """Return a name as citations show it."""
    return name if len(name) <= 30 else f"{name[:15]}...{name[-10:]}"
