"""Every link of the Markdown files has a target, on GitHub and on the site."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pymdownx.slugs import slugify  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(
        path
        for top in (".github", "docs", "examples", "integrations", "kernels")
        for path in (ROOT / top).rglob("*.md")
    ),
]
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
NAMED = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_link_has_a_target(page: Path) -> None:
    assert list(faults(page, page.read_text("utf-8"))) == []


def test_faults_are_found() -> None:
    page = DOCS / "invented.md"
    text = """# One title
[good](placement.md#agents) [good](#one-title) [good](https://example.com/a) ![good](pictures/prompt.svg)
    [no file](nowhere.md) [no anchor](placement.md#nowhere) [typo](htps://example.com) [typo](https:/example.com)
    [outside](../../nowhere.md) `[code](nowhere.md)` [no host](https://) [own anchor](#two) [absolute](/docs/faq.md)
    """
    assert [fault.partition(" ")[0] for fault in faults(page, text)] == [
        "nowhere.md", "placement.md#nowhere", "htps://example.com", "https:/example.com", "../../nowhere.md",
        "https://", "#two", "/docs/faq.md",
    ]  # fmt: skip


def faults(page: Path, text: str) -> Iterator[str]:
    """Yield each link of a page that leads nowhere, and why."""
    prose = CODE.sub("", text)
    for link in (link for pattern in (LINK, NAMED, HTML) for link in pattern.findall(prose)):
        if reason := fault(page, text, link):
            yield f"{link} {reason}"


def fault(page: Path, text: str, link: str) -> str | None:
    parts = urlsplit(link)
    if parts.scheme == "mailto":
        return None if "@" in parts.path else "has no address"
    if parts.scheme or parts.netloc:
        usable = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+(:\d+)?", parts.netloc)
        return None if usable else "is no web address"
    if parts.path.startswith("/"):
        return "is no relative link"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(ROOT) or not (target == page or target.exists()):
        return "has no file"
    if not parts.fragment:
        return None
    if target.suffix != ".md":
        return None if re.fullmatch(r"L\d+(-L\d+)?", parts.fragment) else "has an anchor, and is no page"
    headings = text if target == page else target.read_text("utf-8")
    if parts.fragment not in github_anchors(headings):
        return "has no such heading on GitHub"
    if page.is_relative_to(DOCS) and target.is_relative_to(DOCS) and parts.fragment not in site_anchors(headings):
        return "has no such heading on the site"
    return None


@cache
def github_anchors(text: str) -> frozenset[str]:
    """Return the anchors of the headings: letters, digits, hyphens; a number behind those that come again."""
    used: Counter[str] = Counter()
    anchors = []
    for heading in headings_of(text):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{used[anchor]}" if used[anchor] else anchor)
        used[anchor] += 1
    return frozenset(anchors)


@cache
def site_anchors(text: str) -> frozenset[str]:
    """Return the anchors that the configuration of the site makes."""
    slug = slugify(case="lower")
    used: Counter[str] = Counter()
    anchors = []
    for heading in headings_of(text):
        anchor = slug(heading, "-")
        anchors.append(f"{anchor}_{used[anchor]}" if used[anchor] else anchor)
        used[anchor] += 1
    return frozenset(anchors)


def headings_of(text: str) -> list[str]:
    """Return the headings of a page as a reader sees them."""
    without_code = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    shown = HEADING.findall(without_code)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "") for heading in shown]
