"""Reads the documents of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from warmprefix import ContextBlock

__all__ = ["read_documents"]

_SUFFIXES = {".md", ".rst", ".txt"}
_MOST_TOKENS = 2_000


def read_documents(folder: Path) -> list[ContextBlock]:
    """Return the texts of a folder, long ones in parts.

    A part has the same bytes for each question, so that an engine that has read it once has it cached.

    Raises:
        ValueError: The folder has no text.
    """
    documents = [
        part
        for path in sorted(folder.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file()
        for part in _parts(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8", errors="replace"))
    ]
    if not documents:
        raise ValueError(f"{folder} must be a folder with {', '.join(sorted(_SUFFIXES))} files")
    return documents


def _parts(name: str, text: str) -> Iterator[ContextBlock]:
    """Yield the paragraphs of a text, as many together as fit."""
    parts: list[str] = []
    for paragraph in filter(str.strip, text.split("\n\n")):
        joined = f"{parts[-1]}\n\n{paragraph}" if parts else paragraph
        if parts and ContextBlock(joined).tokens <= _MOST_TOKENS:
            parts[-1] = joined
        else:
            parts.append(paragraph)
    for number, part in enumerate(parts, 1):
        yield ContextBlock(part, id=name if len(parts) == 1 else f"{name}:{number}")
