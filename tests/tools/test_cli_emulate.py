"""The command line as a whole, and `warmprefix emulate`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import typer

import warmprefix
from warmprefix.errors import MissingExtraError
from warmprefix_tools.cli import app

Run = Callable[..., Any]

OPTIONS = ["--kv-blocks", "100", "--base-ttft", "0", "--prefill-rate", "1e9", "--decode-rate", "1e9"]


@contextmanager
def emulating(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `warmprefix emulate` on a free port; yield the process and the root URL that it prints."""
    command = [sys.executable, "-m", "warmprefix_tools", "emulate", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announced = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert announced, process.stderr.read() if process.stderr else ""
            yield process, announced[0]
        finally:
            process.kill()


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


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (["--profile", "anthropic"], "cache of anthropic, context limit 1000000"),
        (
            ["--profile", "vllm-checkpoints(128)", "--window", "512"],
            "cache of vllm-checkpoints(128), 4096 KV blocks of 128 tokens, context limit 497536",
        ),
    ],
)
def test_emulate_prints_the_profile(options: list[str], described: str) -> None:
    with emulating(*options) as (process, url):
        assert process.stdout is not None
        assert described in process.stdout.readline()
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}]}
        assert httpx.post(f"{url}/v1/messages", json=body).status_code == 200


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


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"warmprefix {warmprefix.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "option", "got"),
    [
        (["emulate", "--kv-blocks", "1"], "kv_blocks", "1"),
        (["emulate", "--block-size", "0"], "block_size", "0"),
        (["emulate", "--prefill-rate", "0"], "prefill_rate", "0"),
        (["emulate", "--base-ttft", "-1"], "base_ttft_ms", "-1"),
        (["emulate", "--decode-rate", "-5"], "decode_rate", "-5"),
        (["emulate", "--model", ""], "model", "''"),
        (["emulate", "--kv-blocks", "10", "--max-model-len", "500"], "max_model_len", "500"),
        (["emulate", "--profile", "nothing"], "profile", "'nothing'"),
        (["emulate", "--window", "512"], "window", "512"),
        (["emulate", "--port", "70000"], "--port must be from 0 to 65,535", "got 70000"),
        (["emulate", "--port", "x"], "--port", "Invalid value"),
        (["juggle"], "juggle", "No such command"),
        (["replay"], "TRACE", "Missing argument"),
    ],
)
def test_bad_option_is_refused_with_its_name_and_value(run: Run, arguments: list[str], option: str, got: str) -> None:
    result = run(*arguments, COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert option in result.stderr
    assert got in result.stderr


def test_version_and_help_need_no_extra(run_main: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "warmprefix_tools.cli")
    assert run_main("--version") == (0, f"warmprefix {warmprefix.__version__}\n", "")
    group: Any = typer.main.get_command(app)
    for arguments, status in ((["--help"], 0), ([], 2)):
        result = run_main(*arguments)
        assert (result.returncode, result.stderr) == (status, "")
        commands = dict(re.findall(r"^  (\S+) +(\S.*)$", result.stdout, re.MULTILINE))
        assert commands == {name: command.help for name, command in group.commands.items()}
        assert result.stdout.endswith(f"\nTo run them: {MissingExtraError('cli', 'typer').command}\n")
    result = run_main("emulate", "--port", "0")
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('cli', 'typer')}\n")


def test_version_and_help_import_no_heavy_module() -> None:
    result = run_script(
        """
        import sys
        from typer.testing import CliRunner
        from warmprefix_tools.cli import app
        assert CliRunner().invoke(app, ["replay", "--help"]).exit_code == 0
        heavy = {"jinja2", "numba", "numpy", "openai", "redis", "scipy", "starlette", "torch", "uvicorn"}
        print(heavy & set(sys.modules))
        """
    )
    assert (result.stdout, result.stderr) == ("set()\n", "")


def test_occupied_port_is_reported_in_one_line_with_status_1(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        result = run("emulate", "--port", occupied.getsockname()[1])
    assert result.returncode == 1
    assert re.fullmatch(r"Cannot listen on 127\.0\.0\.1, port \d+: Address already in use\.\n", result.stderr)


def test_missing_server_is_reported_with_the_command_that_installs_it(
    run_main: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "warmprefix_tools.emulator.server", raising=False)
    result = run_main("emulate", "--port", "0")
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('cli', 'uvicorn')}\n")


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "pydantic", "prometheus_client"])
def test_library_without_the_extra_reports_the_command_that_installs_it(module: str) -> None:
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
