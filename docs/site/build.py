"""What the site adds to the pages: the reference, from the code, and links into the repository."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from warmprefix_tools.cli import app

sys.path.insert(0, str(Path(__file__).parent))
from reference import ROOT, overview_page, package_page, public_names

LOG = logging.getLogger("mkdocs.hooks.warmprefix")
OUTWARD = re.compile(r"\]\((?:\.\./)+([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each public package and one for the command line."""
    files.append(File.generated(config, "api/index.md", content=overview_page()))
    for package in public_names():
        page = File.generated(config, f"api/{package}.md", content=package_page(package))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    files.append(File.generated(config, "cli.md", content=command_line_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside `docs` lead to the repository."""
    if page.file.generated_by:
        return markdown
    return OUTWARD.sub(lambda link: _repository_link(link, page, config), markdown)


def _repository_link(link: re.Match[str], page: Page, config: MkDocsConfig) -> str:
    target = (ROOT / "docs" / page.file.src_uri).parent.joinpath(link[0][2:]).resolve()
    if target.is_relative_to(ROOT / "docs"):
        return link[0]
    if not target.exists():
        LOG.warning("%s: no file %s", page.file.src_uri, link[1])
        return link[0]
    kind = "tree" if target.is_dir() else "blob"
    return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT).as_posix()}"


def command_line_page() -> str:
    """Return all commands with their arguments and options."""
    command: Any = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="warmprefix")
    return text.replace("# `warmprefix`", "# Command line", 1)
