"""Agents with the plugins of this project, installed as their users install them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from client_programs import AGENTS, ROOT, AgentProgram, Home

__all__ = ["GATEWAY", "PLUGGED", "PluggedAgent", "install_packages", "with_packages"]

GATEWAY = "WARMPREFIX_GATEWAY"
"""Variable of a home with the gateway's address, without `/v1`; the home's base URL is the engine's."""

_PLUGINS = ROOT / "integrations"
_AGENTS = {agent.name: agent for agent in AGENTS}
_Step = Callable[[Home, Path], None]


class PluggedAgent(NamedTuple):
    """An agent whose `prepare` installs a plugin, and what that plugin does."""

    program: AgentProgram
    remove: Callable[[Home], None] | None = None
    """Remove the plugin; None where it is a command that is no longer used."""
    uses_gateway: bool = True
    """False if the plugin works in the agent's own process."""
    session_header: str = "x-session-id"
    """Header that names the session."""
    names_itself: bool = True
    """True if the plugin sends the agent's name."""


def _command(agent: AgentProgram) -> Path:
    path = agent.command()
    assert path is not None, f"{agent.name} is not installed"
    return path


def _plugged(name: str, install: _Step, remove: _Step) -> PluggedAgent:
    agent = _AGENTS[name]

    def prepare(home: Home) -> None:
        agent.prepare(home)
        install(home, _command(agent))

    return PluggedAgent(agent._replace(prepare=prepare), lambda home: remove(home, _command(agent)))


def _install_in_opencode(home: Home, command: Path) -> None:
    settings = json.loads((home.work / "opencode.json").read_text())
    home.write("work/opencode.json", {**settings, "model": f"gateway/{home.model}"})
    home.run(command, "plugin", _PLUGINS / "opencode")


def _remove_from_opencode(home: Home, command: Path) -> None:
    file = home.work / ".opencode" / "opencode.json"
    settings = json.loads(file.read_text())
    settings["plugin"].remove(f"{_PLUGINS / 'opencode'}")
    file.write_text(json.dumps(settings))


def _openclaw(home: Home, command: Path, *arguments: str) -> None:
    path = f"{command.parent}:{command.parents[2] / 'bin'}:{os.environ['PATH']}"  # it needs Node 24
    home.run(_PLUGINS / "openclaw" / "warmprefix-plugin", *arguments, PATH=path)


def _install_in_openclaw(home: Home, command: Path) -> None:
    _openclaw(home, command, "install")


def _remove_from_openclaw(home: Home, command: Path) -> None:
    _openclaw(home, command, "remove")


def install_packages(home: Home) -> None:
    """Install this project for the Python programs of a home, in place of their environments, which tests share."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", home.folder / "packages", ROOT)
    subprocess.run(pip, check=True, capture_output=True)


def with_packages(home: Home) -> Home:
    """Return a home whose Python programs see those packages, too."""
    return replace(home, variables={**home.variables, "PYTHONPATH": f"{home.folder / 'packages'}"})


def _install_in_hermes(home: Home, command: Path) -> None:
    clone = home.folder / "warmprefix"  # what is not committed is tested, too
    for part in ("core", "integrations"):
        shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    for step in (("init",), ("add", "."), ("-c", "user.name=x", "-c", "user.email=x", "commit", "-m", "x")):
        home.run("git", "-C", clone, *step)
    home.run(command, "plugins", "install", "--enable", clone.as_uri())


def _remove_from_hermes(home: Home, command: Path) -> None:
    home.run(command, "plugins", "remove", "warmprefix")


def _claude_code() -> PluggedAgent:
    agent = _AGENTS["Claude Code"]

    def ask(home: Home, command: Path, question: str, goes_on: bool) -> str:
        path = {"PATH": f"{command.parent}:{os.environ['PATH']}"}
        wrapper = _PLUGINS / "claude_code" / "claude-warmprefix"
        return agent.ask(replace(home, variables={**home.variables, **path}), wrapper, question, goes_on)

    header = "x-claude-code-session-id"
    return PluggedAgent(agent._replace(ask=ask), session_header=header, names_itself=False)


PLUGGED = (
    _plugged("OpenCode", _install_in_opencode, _remove_from_opencode),
    _plugged("OpenClaw", _install_in_openclaw, _remove_from_openclaw),
    _plugged("Hermes", _install_in_hermes, _remove_from_hermes)._replace(uses_gateway=False),
    _claude_code(),
)
