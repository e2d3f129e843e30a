"""The text of a user's own documents: plain text, Markdown and HTML, as passages."""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warmprefix import ContextBlock
from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import LEAST_TOKENS, split_text, tokens_of
from warmprefix_tools.report.amounts import listed
from warmprefix_tools.report.visible import visible

try:
    from charset_normalizer import from_bytes
    from markdownify import ATX, markdownify
except ImportError as exc:
    raise MissingExtraError("demo", exc.name or "markdownify") from exc

__all__ = ["LIMITS", "Documents", "Passage", "read_documents"]

_SUFFIXES = (".htm", ".html", ".md", ".rst", ".txt")
_NO_TEXT = re.compile(r"<(script|style|template|noscript|svg|head)\b.*?</\1\s*>", re.I | re.S)
_MARKS_OF_UNICODE = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins like UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_RARE_ENCODINGS = ["hp_roman8", "mac_greek", "mac_iceland", "mac_latin2", "mac_roman", "mac_turkish"]
"""Encodings for which Western European texts in Latin-1 are mistaken."""
_MAX_FILES = 2_000
_MAX_FILE_BYTES = 1_000_000
_MAX_BYTES = 8_000_000
LIMITS = f"{_MAX_FILES:,} files and {_MAX_BYTES // 1_000_000} MB"
"""Most that is read, in words."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
"""Other people's text. Hidden folders are skipped too."""

_HEADING = re.compile(r"^#{1,6}[ \t]+(\S.*)$", re.M)
_LONG_RUN = re.compile(r"([^\w\n])\1{20,}")
"""Lines drawn with signs, and columns of spaces, which hold no words."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.]+")
_LONGEST_NAME = 28  # leaves room for numbers in a label
_LONGEST_TITLE = 60


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that is retrieved as a whole."""

    block: ContextBlock
    document: str
    """Path of the file below the folder."""
    title: str
    """The heading above the passage, or the name of its file."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The passages of a folder or file, in the order of paths. All names are safe to print."""

    name: str
    """The folder or file, as the user gave it."""
    files: int
    """Files with at least one passage."""
    passages: tuple[Passage, ...]
    remarks: str
    """Sentences on files that were left out, each after a space; "" if everything was read."""


class _UnusableFileError(Exception):
    """A file without text; the message has the reason."""


def read_documents(path: Path) -> Documents:
    """Read the documents below a folder, or a single file; the same files give the same passages.

    Links to folders are not followed. A text that occurs twice makes one passage.

    Raises:
        DemoError: There is no such folder or file, or it cannot be read.
    """
    is_folder = path.is_dir()
    try:
        _ = os.listdir(path) if is_folder else path.stat()
    except (OSError, ValueError) as error:
        raise DemoError(f"Cannot read {visible(str(path))}: {getattr(error, 'strerror', error)}.") from error
    passages: dict[str, Passage] = {}  # by text
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    names: Counter[str] = Counter()
    files = size = 0
    limit = ""
    for file in _listed(path) if is_folder else [path]:
        if files >= _MAX_FILES or size >= _MAX_BYTES:
            limit = f" Reading stopped at the limit of {LIMITS}."
            break
        document = visible(str(file.relative_to(path)) if is_folder else file.name)
        before = len(passages)
        try:
            if is_folder and file.suffix.lower() not in _SUFFIXES:
                raise _UnusableFileError("of other formats")
            data = _content(file)
            size += len(data)
            label = _label(file, names)
            for number, (title, text) in enumerate(_titled(_text(file, data)), start=1):
                title = visible(title or file.stem)[:_LONGEST_TITLE]
                passages.setdefault(text, Passage(ContextBlock(text, f"{label}:{number}"), document, title))
            if len(passages) == before:
                raise _UnusableFileError("without a passage that is long enough and new")
            files += 1
        except _UnusableFileError as error:
            left_out[str(error)].append(visible(file.name))
    groups = [f"{len(each):,} {reason} (such as {each[0]})" for reason, each in left_out.items()]
    remarks = (f" Left out: {listed(groups)}." if groups else "") + limit
    return Documents(visible(str(path)), files, tuple(passages.values()), remarks)


def _listed(root: Path) -> Iterator[Path]:
    """Yield the files of a folder, then those of its folders, in the order of names."""
    for folder, folders, files in os.walk(str(root)):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name[0] != ".")


def _label(file: Path, names: Counter[str]) -> str:
    """Return a name that only this file has, and that can be part of a label."""
    name = _UNSAFE.sub("-", file.stem).strip("-_.")[:_LONGEST_NAME] or "document"
    names[name] += 1
    return name if names[name] == 1 else f"{name}-{names[name]}"


def _content(file: Path) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise _UnusableFileError("not a regular file")
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise _UnusableFileError("unreadable") from error


def _text(file: Path, data: bytes) -> str:
    text = _decoded(data)
    if file.suffix.lower() in (".htm", ".html"):
        try:
            text = markdownify(
                _NO_TEXT.sub("", text),
                heading_style=ATX,
                strip=["a", "img"],
                escape_asterisks=False,
                escape_underscores=False,
                escape_misc=False,
            )
        except RecursionError as error:
            raise _UnusableFileError("of HTML that is nested too deeply") from error
    return _LONG_RUN.sub(lambda run: run[0][:20], text.replace("\r\n", "\n").replace("\r", "\n"))


def _decoded(data: bytes) -> str:
    """Return data as text; a last character that is incomplete, because a long file was cut, is left out."""
    unicode = next((name for mark, name in _MARKS_OF_UNICODE if data.startswith(mark)), None)
    if unicode is None and b"\0" in data:
        raise _UnusableFileError("binary")
    try:
        return codecs.getincrementaldecoder(unicode or "utf-8")().decode(data)
    except UnicodeDecodeError as error:
        found = None if unicode else from_bytes(data, cp_exclusion=_RARE_ENCODINGS)
        best = found.best() if found else None
        if found is None or best is None:
            raise _UnusableFileError("of an unknown encoding") from error
    # Western European among equals.
    equal = (each for each in found if (each.chaos, each.coherence) == (best.chaos, best.coherence))
    return str(next((each for each in equal if each.encoding == "cp1252"), best))


def _titled(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield heading and text of each passage; a part with a heading of its own begins one if it is long enough."""
    start, title = 0, None
    parts: list[tuple[str | None, str]] = []
    for heading in _HEADING.finditer(text):
        before = text[start : heading.start()]
        if tokens_of(before) >= LEAST_TOKENS:
            parts.append((title, before))
            start, title = heading.start(), heading[1]
        elif not before.strip():
            title = title or heading[1]
    for part_title, part in [*parts, (title, text[start:])]:
        yield from ((part_title, body) for body in split_text(part) if tokens_of(body) >= LEAST_TOKENS)
