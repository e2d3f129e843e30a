"""Words that make a sentence hard to read for people whose first language is not English."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = [
    ".github", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "README.md", "SECURITY.md",
    "benchmarks", "conftest.py", "core", "docs", "examples", "integrations", "kernels", "mkdocs.yml", "pyproject.toml",
    "run.py", "tests", "tools",
]  # fmt: skip
SUFFIXES = {".cff", ".css", ".html", ".j2", ".js", ".lua", ".md", ".mdx", ".py", ".toml", ".yaml", ".yml"}
WORDS = [
    # Data does not speak: report, notify, receive, record, apply, return.
    *("tell", "tells", "told", "telling", "hear", "hears", "heard", "hearing", "say", "says", "said", "saying"),
    *("know", "knows", "knew", "known", "knowing", "owe", "owes", "owed", "owing", "teach", "teaches", "taught"),
    # Fix, again, next to; and name the role.
    *("mend", "mends", "mended", "mending", "anew", "beside", "nobody", "whoever", "somebody", "everybody"),
]
PHRASES = ["so many", "is (?-i:none)", "some better"]
UNWANTED = re.compile(
    rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])|"
    + "|".join(rf"\b{phrase.replace(' ', chr(92) + 's+')}\b" for phrase in PHRASES),
    re.IGNORECASE,
)
CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def test_no_unwanted_word_in_code_or_documentation() -> None:
    assert list(unwanted_words()) == []


def test_the_check_finds_words_inside_names() -> None:
    for line in ("def _told_of(self)", "class AlreadyHeard:", "They know it.", "There is none."):
        assert UNWANTED.search(separated(line))
    for line in ("unknown", "essay", "acknowledge", "There are none."):
        assert not UNWANTED.search(separated(line))


def unwanted_words() -> Iterator[str]:
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in UNWANTED.finditer(separated(line)):
                yield f"{path.relative_to(ROOT)}:{number}: {match.group()}"


def texts() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file != Path(__file__) and "results" not in file.parts:
                yield file


def separated(line: str) -> str:
    """Put a mark between the words of names in camel case."""
    return CAMEL_CASE.sub("_", line)
