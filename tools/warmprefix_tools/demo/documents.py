"""The text of a user's own documents: plain text, Markdown, reStructuredText and HTML, as passages."""

from __future__ import annotations

import codecs
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warmprefix import ContextBlock
from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import BLANK_LINES, LEAST_TOKENS, MOST_TOKENS, packed, tokens_of
from warmprefix_tools.report.amounts import listed
from warmprefix_tools.report.visible import visible

try:
    from charset_normalizer import from_bytes
    from markdownify import ATX, markdownify
except ImportError as exc:
    raise MissingExtraError("demo", exc.name or "markdownify") from exc

__all__ = ["LIMITS", "Documents", "LeftOut", "Passage", "read_documents"]

SUFFIXES = (".htm", ".html", ".md", ".rst", ".txt")
_HTML = (".htm", ".html")
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
"""What is read at most, in words."""
_MAX_NAMES = 100_000
"""Most names of files and folders to look at, so that the command ends below `/` too."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
"""Other people's text. Hidden folders are skipped too."""

_HEADING = re.compile(
    r"^(?:\#{1,6}[ \t]+(?P<marked>\S.*)|(?P<underlined>\S.*)\n(?P<line>[=\-~^\"'*+])(?P=line){2,}[ \t]*)$", re.M
)
_LONG_RUN = re.compile(r"([^\w\n])\1{20,}")
"""Lines drawn with signs, and columns of spaces, which hold no words."""
_SENTENCE_ENDS = (re.compile(r"(?<=[.!?])\s+"), re.compile(r"(?<=[。！？；।؟])"), re.compile(r"\s+"))
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
class LeftOut:
    """Files that were not read, or not read to their ends, for one reason."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Documents:
    """The passages of a folder or file, in the order of paths. All names are safe to print."""

    name: str
    """The folder or file, as the user gave it."""
    files: int
    """Files with at least one passage."""
    passages: tuple[Passage, ...]
    left_out: tuple[LeftOut, ...]
    limit: str | None
    """The limit at which reading stopped; None if everything was read."""

    @property
    def limit_remark(self) -> str:
        """A sentence on the limit at which reading stopped; "" if everything was read."""
        return f"Reading stopped at the limit of {self.limit}." if self.limit else ""

    @property
    def remarks(self) -> str:
        """Sentences on files that were left out, each after a space; "" if everything was read."""
        groups = [f"{each.count:,} {each.reason} (such as {each.example})" for each in self.left_out]
        sentences = [f"Left out: {listed(groups)}." if groups else "", self.limit_remark]
        return "".join(f" {sentence}" for sentence in sentences if sentence)


def read_documents(path: Path) -> Documents:
    """Read the documents below a folder, or a single file; the same files give the same passages.

    Links to folders are not followed. A text that occurs twice makes one passage.

    Raises:
        DemoError: There is no such folder or file, or it cannot be read.
    """
    reader = _Reader(path)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise DemoError(f"Cannot read {visible(str(path))}: {_reason(error)}.") from error
    if is_folder:
        reader.read_folder()
    else:
        reader.read_file(path)
    return reader.documents()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Reader:
    """Reads files and counts the others."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._passages: dict[str, Passage] = {}  # by text
        self._names: dict[str, int] = {}
        self._left_out: dict[str, LeftOut] = {}
        self._files = 0
        self._bytes = 0
        self._limit: str | None = None

    def documents(self) -> Documents:
        """Return what was read."""
        return Documents(
            visible(str(self._root)),
            self._files,
            tuple(self._passages.values()),
            tuple(self._left_out.values()),
            self._limit,
        )

    def read_folder(self) -> None:
        """Read the files with the suffixes of text, until a limit is reached."""
        for file in self._listed():
            if file.suffix.lower() not in SUFFIXES:
                self._leave_out("of other formats", file)
                continue
            if self._files >= _MAX_FILES:
                self._limit = f"{_MAX_FILES:,} files"
            elif self._bytes >= _MAX_BYTES:
                self._limit = f"{_MAX_BYTES // 1_000_000} MB"
            if self._limit is not None:
                return
            self.read_file(file)

    def _listed(self) -> Iterator[Path]:
        """Yield the files of a folder, then those of its folders, in the order of names."""
        looked_at = 0

        def failed(error: OSError) -> None:
            if error.filename == str(self._root):
                raise DemoError(f"Cannot read {visible(str(self._root))}: {_reason(error)}.") from error
            self._leave_out("unreadable", Path(error.filename))

        for folder, folders, files in os.walk(str(self._root), onerror=failed):
            looked_at += len(folders) + len(files)
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
            yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))
            if looked_at > _MAX_NAMES:
                self._limit = f"{_MAX_NAMES:,} names of files and folders"
                return

    def read_file(self, file: Path) -> None:
        """Add the passages of one file, or count it as left out."""
        try:
            if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe or a device might not end
                self._leave_out("not a regular file", file)
                return
            with file.open("rb") as opened:
                data = opened.read(_MAX_FILE_BYTES + 1)
        except OSError:
            self._leave_out("unreadable", file)
            return
        self._bytes += len(data)
        text = self._decoded(file, data)
        if text is not None and not self._add(file, text):
            self._leave_out("without a passage that is long enough and new", file)

    def _decoded(self, file: Path, data: bytes) -> str | None:
        encoding = next((name for mark, name in _MARKS_OF_UNICODE if data.startswith(mark)), None)
        if encoding is None and b"\0" in data:
            self._leave_out("binary", file)
            return None
        is_cut = len(data) > _MAX_FILE_BYTES
        text = _text(data, encoding or "utf-8", is_cut=is_cut)
        if text is None and encoding is None:
            text = _guessed(data)
        if text is None:
            self._leave_out("of an unknown encoding", file)
            return None
        if is_cut:
            self._leave_out(f"longer than {_MAX_FILE_BYTES // 1_000_000} MB, read up to there", file)
        if file.suffix.lower() in _HTML:
            try:
                text = markdownify(
                    _NO_TEXT.sub("", text),
                    heading_style=ATX,
                    strip=["a", "img"],
                    escape_asterisks=False,
                    escape_underscores=False,
                    escape_misc=False,
                )
            except RecursionError:
                self._leave_out("of HTML that is nested too deeply", file)
                return None
        return _LONG_RUN.sub(lambda run: run[0][:20], text.replace("\r\n", "\n").replace("\r", "\n"))

    def _add(self, file: Path, text: str) -> bool:
        """Add the passages of a text; return False if there are none."""
        document = visible(str(file.relative_to(self._root) if file != self._root else file.name))
        name, number, found = self._name(file), 0, False
        for title, body in _sections(text):
            for passage in _bodies(body):
                number += 1
                if passage in self._passages:
                    continue
                block = ContextBlock(passage, f"{name}:{number}")
                self._passages[passage] = Passage(block, document, visible(title or file.stem)[:_LONGEST_TITLE])
                found = True
        self._files += found
        return found

    def _name(self, file: Path) -> str:
        """Return a name that only this file has, and that can be part of a label."""
        name = _UNSAFE.sub("-", file.stem).strip("-_.")[:_LONGEST_NAME] or "document"
        self._names[name] = self._names.get(name, 0) + 1
        return name if self._names[name] == 1 else f"{name}-{self._names[name]}"

    def _leave_out(self, reason: str, file: Path) -> None:
        before = self._left_out.get(reason)
        self._left_out[reason] = LeftOut(
            reason, 1 if before is None else before.count + 1, visible(file.name) if before is None else before.example
        )


def _text(data: bytes, encoding: str, *, is_cut: bool) -> str | None:
    """Return decoded data, without a character at the end that was cut; None if it is of another encoding."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if not is_cut or error.start < len(data) - 4:
            return None
        return data[: error.start].decode(encoding)


def _guessed(data: bytes) -> str | None:
    """Return data as text in the likeliest encoding, Western European among equals; None without one."""
    found = from_bytes(data, cp_exclusion=_RARE_ENCODINGS)
    best = found.best()
    if best is None:
        return None
    equal = (each for each in found if (each.chaos, each.coherence) == (best.chaos, best.coherence))
    return str(next((each for each in equal if each.encoding == "cp1252"), best))


def _sections(text: str) -> Iterator[tuple[str | None, str]]:
    r"""Yield heading and text of the parts of a document, each long enough for a passage if the document is.

    >>> [heading for heading, _ in _sections("Preface\n\n# One\n" + "word " * 99 + "\n# Two\n" + "word " * 99)]
    [None, 'Two']
    """
    start, heading = 0, None
    for found in _HEADING.finditer(text):
        title = (found["marked"] or found["underlined"]).strip("# \t")
        before = text[start : found.start()]
        if tokens_of(before) >= LEAST_TOKENS:
            yield heading, before
            start, heading = found.start(), title
        elif not before.strip():
            heading = heading or title
    yield heading, text[start:]


def _bodies(text: str) -> list[str]:
    """Return a text in pieces that end where paragraphs end if these are short enough; none for too short a text."""
    pieces = [
        piece for paragraph in BLANK_LINES.split(text) if paragraph.strip() for piece in _split(paragraph.strip("\n"))
    ]
    bodies = [body.strip("\n") for body in packed(pieces, "\n\n")]
    if len(bodies) > 1 and tokens_of(bodies[-1]) < LEAST_TOKENS:
        bodies[-2:] = ["\n\n".join(bodies[-2:])]
    return [body for body in bodies if tokens_of(body) >= LEAST_TOKENS]


def _split(paragraph: str) -> list[str]:
    """Return a paragraph, or parts of one that is too long: of lines, of sentences, of words, of characters."""
    if tokens_of(paragraph) <= MOST_TOKENS:
        return [paragraph]
    lines = paragraph.split("\n")
    if len(lines) > 1:
        return packed((piece for line in lines for piece in _split(line)), "\n")
    for end in _SENTENCE_ENDS:
        parts = end.split(paragraph)
        if len(parts) > 1:
            joint = "" if end is _SENTENCE_ENDS[1] else " "
            return packed((piece for part in parts for piece in _split(part)), joint)
    half = len(paragraph) // 2
    return [*_split(paragraph[:half]), *_split(paragraph[half:])]
