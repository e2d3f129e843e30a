"""What the site adds to the pages: the reference, from the code, and links into the repository."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from warmprefix_tools.cli import app
from warmprefix_tools.summaries import SUMMARIES

sys.path.insert(0, str(Path(__file__).parent))
from reference import ROOT, SOURCES, overview_page, package_page, public_names

LOG = logging.getLogger("mkdocs.hooks.warmprefix")
LINK = re.compile(r"\]\(([^):#\s]+)")
MERMAID = re.compile(r"^```mermaid\nflowchart \w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@event_priority(100)  # before mkdocstrings reads the paths
def on_config(config: MkDocsConfig) -> None:
    """List the packages below the overview of the reference, and the folders that have them."""
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = SOURCES
    for section in config.nav or ():
        for entry in section.get("Reference", ()) if isinstance(section.get("Reference"), list) else ():
            if entry.get("Python") == "api/index.md":
                entry["Python"] = ["api/index.md", *({name: f"api/{name}.md"} for name in public_names())]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each public package and one for the command line."""
    files.append(File.generated(config, "api/index.md", content=overview_page()))
    for package in public_names():
        files.append(File.generated(config, f"api/{package}.md", content=package_page(package)))
    files.append(File.generated(config, "cli.md", content=command_line_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files that the site lacks lead to the repository."""
    if page.file.generated_by:
        return markdown
    source = f"{config.repo_url}/blob/main/docs/{page.file.src_uri}"
    markdown = MERMAID.sub(lambda chart: _boxes(chart[1], source), markdown)
    return LINK.sub(lambda link: _repository_link(link, page, config), markdown)


def _boxes(chart: str, source: str) -> str:
    """Return a flowchart of Mermaid as nested boxes; Mermaid itself would be loaded from a third party."""
    lines = ['<div class="rooms">']
    for line in map(str.strip, chart.splitlines()):
        if box := re.fullmatch(r'subgraph (\w+)(?: \["(.*)"\])?', line):
            lines.append(f'<div class="rooms"><b>{box[2] or box[1]}</b>')
        elif line == "end":
            lines.append("</div>")
        elif node := re.fullmatch(r'(\w+)(?:\["(.*)"\])?', line):
            lines.append(f"<code>{node[2] or node[1]}</code>")
    arrows = f"The arrows are in [the picture on GitHub]({source}#the-picture)."
    return "".join([*lines, "</div>"]) + f"\n\n{arrows}"


def _repository_link(link: re.Match[str], page: Page, config: MkDocsConfig) -> str:
    target = (ROOT / "docs" / page.file.src_uri).parent.joinpath(link[1]).resolve()
    excluded = config.exclude_docs
    if target.is_relative_to(ROOT / "docs") and not (excluded and excluded.match_file(_path(target, ROOT / "docs"))):
        return link[0]
    if not target.exists():
        LOG.warning("%s: no file %s", page.file.src_uri, link[1])
        return link[0]
    kind = "tree" if target.is_dir() else "blob"
    return f"]({config.repo_url}/{kind}/main/{_path(target, ROOT)}"


def _path(target: Path, folder: Path) -> str:
    path = target.relative_to(folder).as_posix()
    return f"{path}/" if target.is_dir() else path


def command_line_page() -> str:
    """Return all commands with their arguments and options."""
    command: Any = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="warmprefix")
    text = text.replace("# `warmprefix`", "# Command line", 1)
    for name, summary in SUMMARIES.items():  # typer cuts them
        last = name.rpartition(" ")[2]
        text = re.sub(rf"^\* `{last}`: .*\.\.\.$", f"* `{last}`: {summary}", text, flags=re.MULTILINE)
    return text
