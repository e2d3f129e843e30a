"""Applications as their users install and start them, and the session that a script makes each of them run.

`python run.py test --all clients` installs them; `WARMPREFIX_CLIENTS` names a folder that has them already.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from warmprefix_requests import RewriteRoute

__all__ = ["AGENTS", "ANSWER", "LAND", "QUESTIONS", "SEA", "AgentProgram", "Home", "installed", "session_script"]

ROOT = Path(__file__).parents[1]
ANSWER = "It is 3,688 metres deep."
QUESTIONS = ("How deep is the sea?", "Are you sure?", "Compare both files.")
"""What the user asks in three turns; the answer to each is `ANSWER`."""
SEA = "".join(f"The sea at place {place} is {place * 7919 % 4000} metres deep.\n" for place in range(90))
LAND = "".join(f"The land at place {place} is {place * 6173 % 4000} metres high.\n" for place in range(90))
"""The files, of 4 kB each."""

Call = dict[str, Any]

_MAX_SECONDS = 600
"""A first start installs more packages in some applications: seconds on an idle machine, minutes on a busy one."""


def installed(environment: str, program: str) -> Path | None:
    """Return the path of a program in an environment of `run.py`; None if it is not there."""
    folder = os.environ.get("WARMPREFIX_CLIENTS")
    path = (Path(folder) / environment if folder else ROOT / f".venv-{environment}") / program
    return path if path.exists() else None


@dataclass(frozen=True)
class Home:
    """The home of one user, where an application keeps its settings, and the server that it asks."""

    folder: Path
    base_url: str
    """With `/v1`."""
    model: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    @property
    def work(self) -> Path:
        """The folder with the files to read."""
        return self.folder / "work"

    def write(self, path: str, settings: object) -> None:
        """Write a file of settings: a text, or JSON, which is YAML too."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(settings if isinstance(settings, str) else json.dumps(settings))

    def run(self, *command: str | Path, **variables: str) -> str:
        """Run a command in the folder of the files; return what it printed.

        Raises:
            AssertionError: It failed; the message is the end of what it wrote to stderr.
        """
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment |= {"HOME": str(self.folder), **self.variables, **variables}
        done = subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MAX_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-1_000:] + done.stderr[-2_000:]
        return done.stdout


class AgentProgram(NamedTuple):
    """A coding agent without a screen."""

    name: str
    """As the gateway's page shows it."""
    environment: str
    program: str
    """Path of the command in the environment."""
    route: RewriteRoute
    read: Callable[[Path], Call]
    """The call of its tool that reads a file."""
    show: Callable[[Path], Call]
    """The call of its tool that runs a command, for `cat`."""
    prepare: Callable[[Home], None]
    """Write its settings."""
    ask: Callable[[Home, Path, str, bool], str]
    """Ask a question, in the session before if that is true; return what it printed."""

    def command(self) -> Path | None:
        """Return the path of the installed command; None if it is not installed."""
        return installed(self.environment, self.program)


def session_script(agent: AgentProgram, one: Path, other: Path) -> list[Call]:
    """Return the answers that make an agent run a session of three turns over two files, with seven tool calls."""
    turns: Sequence[Sequence[Call]] = (
        (agent.read(one), agent.read(one), agent.show(one), agent.read(other)),
        (agent.read(one),),
        (agent.show(one), agent.read(other)),
    )
    answers: list[Call] = []
    for turn in turns:
        answers += [*({"calls": [call]} for call in turn), {"text": ANSWER}]
    return answers


# -- OpenCode ----------------------------------------------------------------------------------------------------------


def _prepare_opencode(home: Home) -> None:
    options = {"baseURL": home.base_url, "apiKey": "x"}
    models = {home.model: {"name": "emulator"}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    home.write("work/opencode.json", {"provider": {"gateway": provider}, "autoupdate": False})


def _ask_opencode(home: Home, command: Path, question: str, goes_on: bool) -> str:
    return home.run(command, "run", *(["-c"] if goes_on else []), "-m", f"gateway/{home.model}", question)


# -- Codex -------------------------------------------------------------------------------------------------------------


def _prepare_codex(home: Home) -> None:
    provider = f'name = "gateway"\nbase_url = "{home.base_url}"\nwire_api = "responses"\nenv_key = "GATEWAY_KEY"\n'
    settings = f'model = "{home.model}"\nmodel_provider = "gateway"\n[model_providers.gateway]\n{provider}'
    home.write(".codex/config.toml", settings)


def _ask_codex(home: Home, command: Path, question: str, goes_on: bool) -> str:
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    which = ("resume", "--last") if goes_on else ()
    return home.run(command, "exec", *flags, *which, question, GATEWAY_KEY="x")


# -- Claude Code -------------------------------------------------------------------------------------------------------


def _ask_claude(home: Home, command: Path, question: str, goes_on: bool) -> str:
    return home.run(
        command,
        *("-p", *(["-c"] if goes_on else []), "--dangerously-skip-permissions", question),
        ANTHROPIC_BASE_URL=home.base_url.removesuffix("/v1"),
        ANTHROPIC_API_KEY="x",
        ANTHROPIC_MODEL=home.model,
        ANTHROPIC_SMALL_FAST_MODEL=home.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",  # it may run as root
    )


# -- OpenClaw ----------------------------------------------------------------------------------------------------------


def _prepare_openclaw(home: Home) -> None:
    model = {
        "id": home.model,
        "name": "emulator",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 131_072,
        "maxTokens": 8_192,
    }
    provider = {"baseUrl": home.base_url, "apiKey": "x", "api": "openai-completions", "models": [model]}
    defaults = {"model": {"primary": f"vllm/{home.model}"}, "workspace": str(home.work)}
    home.write(
        ".openclaw/openclaw.json", {"models": {"providers": {"vllm": provider}}, "agents": {"defaults": defaults}}
    )


def _ask_openclaw(home: Home, command: Path, question: str, goes_on: bool) -> str:
    node = f"{command.parents[2] / 'bin'}:{os.environ['PATH']}"  # it needs Node 24
    return home.run(command, "agent", "--local", "--session-id", "sea", "--message", question, PATH=node)


# -- Hermes ------------------------------------------------------------------------------------------------------------


def _prepare_hermes(home: Home) -> None:
    model = {"default": home.model, "provider": "custom", "base_url": home.base_url, "api_key": "x"}
    home.write(".hermes/config.yaml", {"model": {**model, "context_length": 131_072}})


def _ask_hermes(home: Home, command: Path, question: str, goes_on: bool) -> str:
    which = ("--continue",) if goes_on else ()
    return home.run(command, "chat", "-Q", "--yolo", *which, "-q", question, OPENAI_API_KEY="x")


def _nothing(home: Home) -> None:
    pass


AGENTS = (
    AgentProgram(
        *("OpenCode", "node", "node_modules/.bin/opencode", "chat"),
        lambda path: {"name": "read", "arguments": {"filePath": str(path)}},
        lambda path: {"name": "bash", "arguments": {"command": f"cat {path}", "description": "Show a file"}},
        *(_prepare_opencode, _ask_opencode),
    ),
    AgentProgram(
        *("Codex", "node", "node_modules/.bin/codex", "responses"),
        lambda path: {"name": "exec_command", "arguments": {"cmd": f"sed -n 1,500p {path}"}},
        lambda path: {"name": "exec_command", "arguments": {"cmd": f"cat {path}"}},
        *(_prepare_codex, _ask_codex),
    ),
    AgentProgram(
        *("Claude Code", "node", "node_modules/.bin/claude", "messages"),
        lambda path: {"name": "Read", "arguments": {"file_path": str(path)}},
        lambda path: {"name": "Bash", "arguments": {"command": f"cat {path}", "description": "Show a file"}},
        *(_nothing, _ask_claude),
    ),
    AgentProgram(
        *("OpenClaw", "node", "node_modules/.bin/openclaw", "chat"),
        lambda path: {"name": "read", "arguments": {"path": str(path)}},
        lambda path: {"name": "exec", "arguments": {"command": f"cat {path}"}},
        *(_prepare_openclaw, _ask_openclaw),
    ),
    AgentProgram(
        *("Hermes", "hermes", "bin/hermes", "chat"),
        lambda path: {"name": "read_file", "arguments": {"path": str(path)}},
        lambda path: {"name": "terminal", "arguments": {"command": f"cat {path}"}},
        *(_prepare_hermes, _ask_hermes),
    ),
)
