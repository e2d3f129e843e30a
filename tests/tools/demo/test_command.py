"""`warmprefix demo` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo.options import DemoOptions

COMMAND = [sys.executable, "-m", "warmprefix_tools", "demo"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=60)


def test_a_short_demo(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = run("--questions", "8", "--json", str(file))
    assert (result.returncode, result.stderr) == (0, "Asking 8 questions, 4 times each ...\n")
    assert "hit ratio" in result.stdout
    assert "\x1b" not in result.stdout
    assert json.loads(file.read_text())["options"]["questions"] == 8


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    script = textwrap.dedent(
        """
        import signal, sys
        from warmprefix_tools.__main__ import main
        from warmprefix_tools.demo.client import ChatClient

        ask, asked = ChatClient.ask, []
        async def interrupted(*arguments):
            asked.append(arguments)
            if len(asked) == 10:
                signal.raise_signal(signal.SIGINT)
            return await ask(*arguments)
        ChatClient.ask = interrupted
        sys.argv = ["warmprefix", "demo"]
        main()
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "Asking 240 questions, 4 times each ...\n")


def test_a_server_that_is_not_there_is_one_line_with_status_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        result = run("--endpoint", url, "--model", "any")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"No answer from {url}: ")
    assert "Traceback" not in result.stderr


def test_a_wrong_call_is_explained_with_status_2() -> None:
    result = run("--kv-blocks", "1")
    assert result.returncode == 2
    assert "kv_blocks is 1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"questions": 0}, "--questions must be 1 or more, got 0"),
        ({"k": 0}, "-k must be"),
        ({"concurrency": 0}, "--concurrency must be"),
        ({"kv_blocks": 1}, "kv_blocks is 1"),
        ({"prefill_rate": 0.0}, "prefill_rate is 0"),
        ({"model": "mine"}, "--endpoint"),
        ({"endpoint": "http://127.0.0.1:1/v1", "prefill_rate": 5.0}, "--prefill-rate"),
    ],
)
def test_options_say_what_is_wrong_with_them(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DemoOptions(**wrong)


@pytest.mark.parametrize(("extra", "module"), [("demo", "openai"), ("cli", "rich"), ("cli", "uvicorn")])
def test_without_the_extra_the_command_says_how_to_get_it(extra: str, module: str) -> None:
    script = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['warmprefix', 'demo', '--questions', '1'];"
        " from warmprefix_tools.__main__ import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError(extra, module)}\n")
