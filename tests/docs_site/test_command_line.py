"""The command line reference has every command and option, with a help text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
import yaml  # type: ignore[import-untyped]

from warmprefix_tools.cli import app

ROOT = Path(__file__).parents[2]


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, by its full name."""
    nested = getattr(command, "commands", None)
    if nested is None:
        yield name, command
        return
    for word, each in nested.items():
        yield from commands(each, f"{name} {word}")


def test_the_page_has_each_command_with_all_its_options(site_hooks: ModuleType) -> None:
    page = site_hooks.command_line_page()
    found = list(commands(typer.main.get_command(app), "warmprefix"))
    assert len(found) > 12
    for name, command in found:
        assert command.help, name
        section = page.partition(f"# `{name}`\n")[2].partition("\n##")[0]
        assert " ".join(command.help.split())[:60] in " ".join(section.split()), name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, f"{name} {parameter.opts}"
                assert all(option in section for option in parameter.opts), f"{name} {parameter.opts}"


def test_links_of_the_menu_lead_into_the_repository() -> None:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Reads the parts that only MkDocs understands as None."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    entries = [target for section in config["nav"] for target in targets(section)]
    outside = [target for target in entries if target.startswith("http")]
    assert len(outside) > 1
    for target in outside:
        path = target.removeprefix(config["repo_url"]).partition("/main/")[2]
        assert path, target
        assert (ROOT / path).exists(), target
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - set(entries) == set()


def targets(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from targets(value)
