"""The command line as a user runs it: in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import typer

import warmprefix
from warmprefix.errors import MissingExtraError

OPTIONS = ["--kv-blocks", "100", "--base-ttft", "0", "--prefill-rate", "1e9", "--decode-rate", "1e9"]


@contextmanager
def emulating(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `warmprefix emulate` on a free port; give the process and the root URL that it prints."""
    command = [sys.executable, "-m", "warmprefix_tools", "emulate", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announced = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert announced, process.stderr.read() if process.stderr else ""
            yield process, announced[0]
        finally:
            process.kill()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmprefix_tools", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_emulate_serves_and_ctrl_c_ends_it_cleanly() -> None:
    with emulating(*OPTIONS, "--model", "mine", "--max-model-len", "800") as (process, url):
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mine", 800)
        body = {"model": "mine", "messages": [{"role": "user", "content": "warm " * 100}]}
        usage = [httpx.post(f"{url}/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
        assert [entry["prompt_tokens_details"]["cached_tokens"] for entry in usage] == [0, 96]

        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


def test_ctrl_c_during_an_answer_prints_no_traceback() -> None:
    with emulating("--prefill-rate", "0.001") as (process, url), ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "Hi."}]}
        asking = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
        while not re.search(r"num_requests_running\{.*\} 1\.0", httpx.get(f"{url}/metrics").text):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert asking.result().status_code == 503
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_version() -> None:
    assert run("--version").stdout == f"warmprefix {warmprefix.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["emulate", "--kv-blocks", "1"], "kv_blocks is 1"),
        (["emulate", "--kv-blocks", "10", "--max-model-len", "500"], "max_model_len is 500"),
        (["emulate", "--port", "70000"], "--port"),
        (["juggle"], "juggle"),
    ],
)
def test_a_wrong_call_is_explained_with_status_2(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], []])
def test_version_and_help_need_no_extra(arguments: list[str]) -> None:
    script = f"""
        import sys
        sys.modules["typer"] = None
        sys.argv = ["warmprefix", *{arguments!r}]
        from warmprefix_tools.__main__ import main
        main()
        """
    result = run_script(script)
    assert (result.returncode, result.stderr) == (0 if arguments else 2, "")
    if arguments == ["--version"]:
        assert result.stdout == f"warmprefix {warmprefix.__version__}\n"
        return
    commands = dict(re.findall(r"^  (\S+) +(\S.*)$", result.stdout, re.MULTILINE))
    assert result.stdout.endswith(f"\nTo run them: {MissingExtraError('cli', 'typer').command}\n")

    from warmprefix_tools.cli import app

    group: Any = typer.main.get_command(app)
    assert commands == {name: command.help.partition("\n")[0] for name, command in group.commands.items()}


def test_a_taken_port_is_one_line_with_status_1() -> None:
    with emulating() as (_, url):
        result = run("emulate", "--port", url.rpartition(":")[2])
    assert result.returncode == 1
    assert re.fullmatch(r"Cannot listen on 127\.0\.0\.1, port \d+: Address already in use\.\n", result.stderr)


@pytest.mark.parametrize("module", ["typer", "uvicorn"])
def test_without_the_extra_the_command_says_how_to_get_it(module: str) -> None:
    result = run_script(
        f"""
        import sys
        sys.modules[{module!r}] = None
        sys.argv = ["warmprefix", "emulate", "--port", "0"]
        from warmprefix_tools.__main__ import main
        main()
        """
    )
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('cli', module)}\n")


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "pydantic", "prometheus_client"])
def test_without_the_extra_the_library_says_how_to_get_it(module: str) -> None:
    result = run_script(
        f"""
        import sys
        sys.modules[{module!r}] = None
        from warmprefix.errors import MissingExtraError
        try:
            from warmprefix_tools.emulator import EmulatorServer
        except MissingExtraError as error:
            print(error)
        """
    )
    assert (result.stdout, result.stderr) == (f"{MissingExtraError('cli', module)}\n", "")


def test_importing_warmprefix_and_the_cache_needs_no_extra() -> None:
    result = run_script(
        """
        import sys
        import warmprefix, warmprefix_tools.emulator
        assert warmprefix_tools.emulator.PrefixCache(10).allocate([1])
        extra = {"typer", "rich", "click", "uvicorn", "starlette", "pydantic", "prometheus_client", "openai"}
        print(extra & set(sys.modules))
        """
    )
    assert (result.stdout, result.stderr) == ("set()\n", "")


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
