"""`warmprefix demo` as a user runs it."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import session
from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.demo_options import DemoOptions

Run = Callable[..., Any]


@pytest.fixture
def read_once(entries: tuple[LibraryEntry, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command use the text that was read for other tests."""
    monkeypatch.setattr(session, "read_standard_library", lambda: entries)


@pytest.mark.usefixtures("read_once")
def test_short_demo_prints_a_report_and_writes_json(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = run("demo", "--questions", "8", "--json", file)
    assert (result.returncode, result.stderr) == (0, "Asking 8 questions, 4 times each ...\n")
    assert "hit ratio" in result.stdout
    assert "\x1b" not in result.stdout
    assert json.loads(file.read_text())["options"]["questions"] == 8


@pytest.mark.usefixtures("read_once")
def test_json_to_standard_output_stands_alone(run: Run) -> None:
    result = run("demo", "--questions", "2", "--placement", "head", "--json", "-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["options"]["questions"] == 2
    assert "hit ratio" in result.stderr


SHORT = ("demo", "--questions", "8", "--placement", "head")


@pytest.mark.usefixtures("read_once")
def test_the_page_replaces_an_older_one_and_no_other_file(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "warmprefix-demo.html"
    for _ in range(2):
        assert run(*SHORT).stdout.endswith(f"The same with charts: {page}\n")
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


@pytest.mark.usefixtures("read_once")
def test_without_a_place_for_the_page_the_report_is_printed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "warmprefix-demo.html").mkdir()
    done = run(*SHORT)
    assert (done.returncode, "No page was written" in done.stdout) == (0, True)
    assert run(*SHORT, "--html", tmp_path / "no" / "page.html").returncode == 2
    assert run(*SHORT, "--html", "-").returncode == 2


@pytest.mark.parametrize("during", ["reading", "asking"])
def test_ctrl_c_ends_the_command_without_a_traceback(small_library: Path, during: str) -> None:
    script = textwrap.dedent(
        f"""
        import signal, sys
        from pathlib import Path
        from warmprefix_tools.__main__ import main
        from warmprefix_tools.demo import session
        from warmprefix_tools.demo.client import ChatClient

        ask, asked, read = ChatClient.ask, [], session.read_standard_library
        async def interrupted(*arguments):
            asked.append(arguments)
            if len(asked) == 10 and {during == "asking"}:
                signal.raise_signal(signal.SIGINT)
            return await ask(*arguments)
        ChatClient.ask = interrupted
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


def test_missing_server_is_one_line_with_status_2(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        result = run("demo", "--endpoint", url, "--model", "any")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"No answer from {url}: ")


def test_unwritable_file_is_one_line_with_status_2_before_the_run(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "demo.json"
    result = run("demo", "--json", file)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Cannot write {file}: there is no directory {file.parent}.\n"


def test_bad_option_ends_the_command_with_status_2(run: Run) -> None:
    result = run("demo", "--kv-blocks", "1", COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert "kv_blocks must be 2 or more (one is the null block), got 1" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"questions": 0}, "--questions must be 1 or more, got 0"),
        ({"k": 0}, "-k must be 1 or more, got 0"),
        ({"concurrency": 0}, "--concurrency must be 1 or more, got 0"),
        ({"kv_blocks": 1}, "kv_blocks must be 2 or more .*, got 1"),
        ({"prefill_rate": 0.0}, "prefill_rate must be above 0, got 0"),
        ({"model": "mine"}, "--model must come with --endpoint, the URL of a real server; got none"),
        ({"model": "mine", "api_key": "secret"}, "^--model and --api-key must come with --endpoint, [^:]*got none$"),
        (
            {"endpoint": "http://127.0.0.1:1/v1", "prefill_rate": 5.0},
            "--prefill-rate must come without --endpoint, .*; got http://127.0.0.1:1/v1",
        ),
    ],
)
def test_bad_options_are_refused_with_name_value_and_rule(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoOptions(**wrong)


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
