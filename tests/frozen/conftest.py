"""Comparison with the committed results of an earlier version.

`python tests/frozen/write.py` writes the results of the working tree in place of the committed ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"

Freeze = Callable[..., None]


def compare(file: str, value: Any, *keys: str) -> None:
    """Check that `value` equals the committed one: the whole JSON file, or the entry below `keys`.

    With `WRITE_FROZEN=1` in the environment, write it there instead.
    """
    path = DATA / file
    value = json.loads(json.dumps(value))  # as the file gives it back: lists for tuples, text keys
    whole = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if os.environ.get("WRITE_FROZEN") == "1":
        DATA.mkdir(exist_ok=True)
        path.write_text(json.dumps(_with_entry(whole, value, keys), indent=1, sort_keys=True) + "\n", "utf-8")
        return
    committed = whole
    for key in keys:
        committed = committed[key]
    assert value == committed, f"{'/'.join([file, *keys])} changed"


def _with_entry(whole: Any, value: Any, keys: tuple[str, ...]) -> Any:
    if not keys:
        return value
    inner = whole.get(keys[0], {}) if isinstance(whole, dict) else {}
    return {**whole, keys[0]: _with_entry(inner, value, keys[1:])}


@pytest.fixture
def freeze() -> Freeze:
    return compare
