"""The public names that an earlier version had are still there."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path

import warmprefix

ROOT = Path(__file__).parents[2]
NAMES: dict[str, list[str]] = runpy.run_path(str(ROOT / "docs/site/reference.py"))["package_names"]()


def test_each_package_has_the_committed_names(freeze: Callable[..., None]) -> None:
    if os.environ.get("WRITE_FROZEN") == "1":
        freeze("public_names.json", NAMES)
    committed = json.loads((ROOT / "tests/frozen/data/public_names.json").read_text("utf-8"))
    missing = {package: set(names) - set(NAMES.get(package, ())) for package, names in committed.items()}
    assert {package: names for package, names in missing.items() if names} == {}


def test_listed_names_of_the_core_exist() -> None:
    assert sorted(warmprefix.__all__) == NAMES["warmprefix"]
    assert all(hasattr(warmprefix, name) for name in warmprefix.__all__)
