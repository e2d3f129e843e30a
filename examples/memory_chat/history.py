"""The messages of a chat in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["load", "save"]


def load(path: Path | None) -> list[dict[str, Any]]:
    """Return the messages in a file; none without a file."""
    if path is None or not path.exists():
        return []
    messages: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return messages


def save(path: Path | None, messages: list[dict[str, Any]]) -> None:
    """Replace the messages in a file at once, so that no crash leaves half of them."""
    if path is None:
        return
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(messages, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(draft, path)
