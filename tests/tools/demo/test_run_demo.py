"""`warmprefix demo` as a user runs it."""

from __future__ import annotations

import importlib
import json
import math
import platform
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer
from warmprefix_tools.local import llama_server

Run = Callable[..., Any]
SHORT = ("demo", "--questions", "8")


def test_the_page_replaces_an_older_one_and_no_other_file(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "warmprefix-demo.html"
    for _ in range(2):
        done = run(*SHORT)
        assert (done.returncode, done.stderr) == (0, "Asking 8 questions, 4 times each ...\n")
        assert done.stdout.count("tokens prefilled (net)") == 2
        assert done.stdout.endswith(f"The same with charts: {page}\n")
        assert "\x1b" not in done.stdout
        assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        page.write_text(page.read_text(encoding="utf-8") + "<!-- older -->", encoding="utf-8")
    page.write_text("mine")
    done = run(*SHORT)
    assert done.returncode == 0
    assert "No page was written: warmprefix-demo.html cannot be." in done.stdout
    assert page.read_text() == "mine"
    other = tmp_path / "other.html"
    assert f"The same with charts: {other}\n" in run(*SHORT, "--html", other).stdout
    assert "tokens prefilled (net)" in other.read_text(encoding="utf-8")


def test_without_a_place_for_the_page_the_report_is_printed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "warmprefix-demo.html").mkdir()
    done = run(*SHORT)
    assert (done.returncode, "No page was written" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--questions", 0], "--questions must be 1 or more, got 0"),
        (["--served-model", "mine"], "--served-model must come with --endpoint, the URL of a real server; got none"),
        (["--model", "--endpoint", "http://x/v1"], "--model runs a model on this machine and --endpoint asks another"),
        (["--html", "a", "--json", "a"], "--html and --json must name different files, got a twice"),
        (["--html", "-"], "--html must name a file"),
        (["--html", "no/page.html"], "Cannot write no/page.html: there is no directory "),
        (["--documents", "nowhere"], "Cannot read nowhere: No such file or directory."),
    ],
)
def test_bad_option_ends_the_command_with_status_2(run: Run, options: list[object], message: str) -> None:
    done = run("demo", *options, COLUMNS="300")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("during", ["reading", "asking"])
def test_ctrl_c_ends_the_command_without_a_traceback(small_library: Path, during: str) -> None:
    script = textwrap.dedent(
        f"""
        import signal, sys
        from pathlib import Path
        from warmprefix_openai import ChatAsker
        from warmprefix_tools.__main__ import main
        from warmprefix_tools.demo import session

        ask, asked, read = ChatAsker.ask, [], session.read_standard_library
        async def interrupted(*arguments):
            asked.append(arguments)
            if len(asked) == 10 and {during == "asking"}:
                signal.raise_signal(signal.SIGINT)
            return await ask(*arguments)
        ChatAsker.ask = interrupted
        def read_some():
            if {during == "reading"}:
                signal.raise_signal(signal.SIGINT)
            return read(Path({str(small_library)!r}))
        session.read_standard_library = read_some
        sys.argv = ["warmprefix", "demo"]
        main()
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "Asking 240 questions, 4 times each ...\n")


# -- real servers ------------------------------------------------------------------------------------------------------


def test_real_server_is_asked_one_run_after_the_other(run: Run) -> None:
    asked: list[str] = []

    def answer(messages: Sequence[ChatMessage]) -> str:
        asked.append(messages[0].text)
        return "An answer."

    config = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with EmulatorServer(config, reader=answer) as server:
        done = run(*SHORT, "--endpoint", server.base_url)
    assert done.returncode == 0
    assert "hit ratio" in done.stdout
    assert "Emulated" not in done.stdout
    assert asked.pop(0) == "Hello."
    sessions = [re.match(r"Session (\d{12})\. You answer", text)[1] for text in asked]  # type: ignore[index]
    assert [len(set(sessions[i : i + 8])) for i in range(0, 32, 8)] == [1] * 4
    assert len(set(sessions)) == 4


def test_missing_server_is_one_line_with_status_2(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        result = run("demo", "--endpoint", url, "--served-model", "any")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"No answer from {url}: ")


def test_wrong_address_or_model_is_one_line_with_status_2(run: Run) -> None:
    with EmulatorServer(EmulatorConfig()) as server:
        url = server.base_url.removesuffix("/v1")
        done = run("demo", "--endpoint", url)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-1].startswith(f"{url} refused a request (404): ")
        assert done.stderr.endswith("Should the URL end in /v1?\n")
        done = run("demo", "--endpoint", server.base_url, "--served-model", "other", "--api-key", "secret")
        assert (done.returncode, "secret" in done.stderr) == (2, False)
        assert "refused a request (404): " in done.stderr


def test_a_server_of_something_else_is_one_line_with_status_2(run: Run) -> None:
    class Site(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>\n</html>")

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Site) as site:
        Thread(target=site.serve_forever, daemon=True).start()
        done = run("demo", "--endpoint", f"http://127.0.0.1:{site.server_port}/v1", "--served-model", "any")
        site.shutdown()
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2  # the announcement comes first


@pytest.mark.parametrize(("extra", "module"), [("demo", "openai"), ("cli", "rich"), ("cli", "uvicorn")])
def test_missing_extra_is_reported_with_the_command_that_installs_it(
    run_main: Run, monkeypatch: pytest.MonkeyPatch, extra: str, module: str
) -> None:
    importlib.import_module("warmprefix_tools.cli")  # reads the options of all commands, once
    monkeypatch.setitem(sys.modules, module, None)
    needing = ("warmprefix_tools.demo.", "warmprefix_tools.console", "warmprefix_tools.emulator.", f"{module}.")
    for name in [name for name in sys.modules if name.startswith(needing)]:
        monkeypatch.delitem(sys.modules, name)
    result = run_main("demo", "--questions", "1")
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError(extra, module)}\n")


def test_options_are_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match=r"--api-key must come with --endpoint, [^:]*got none$"):
        DemoOptions(api_key="secret")


# -- numbers and the model on this machine -----------------------------------------------------------------------------


def test_json_has_the_numbers_of_the_tables(run: Run) -> None:
    done = run(*SHORT, "--json", "-")
    assert done.returncode == 0
    assert "tokens prefilled (net)" in done.stderr
    fields = json.loads(done.stdout)
    assert (fields["questions"], fields["passages"]) == (8, 10)
    shown = re.findall(r"^tokens prefilled \(net\) +([\d,]+) +([\d,]+)", done.stderr, re.MULTILINE)
    counted = [
        (f"{arms['relevance']['prefilled']:,}", f"{arms['warmprefix']['prefilled']:,}")
        for arms in fields["placements"].values()
    ]
    assert shown == counted
    assert "model" not in fields


def test_without_llama_cpp_the_model_is_not_fetched(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama_server, "find_spec", lambda name: None)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    done = run("demo", "--model", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MissingExtraError('local', 'xllamacpp')}\n")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    done = run("demo", "--model", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "this is Linux on riscv64. Any OpenAI-compatible server works with --endpoint." in done.stderr
    assert list(tmp_path.iterdir()) == []
