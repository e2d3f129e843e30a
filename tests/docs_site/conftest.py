"""The reference of the site, and its public objects as griffe reads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import griffe
import pytest

ROOT = Path(__file__).parents[2]


def load(name: str, path: Path) -> ModuleType:
    """Return the module in a file that no package holds."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = load("report_conftest", ROOT / "tests/tools/report/conftest.py").browser
"""The fixture that starts a headless browser."""


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """Return the module that lists the pages of the reference."""
    return load("site_reference", ROOT / "docs/site/reference.py")


@pytest.fixture(scope="session")
def site_hooks() -> ModuleType:
    """Return the hooks of MkDocs, which add the generated pages. The first tier's environment has no MkDocs."""
    pytest.importorskip("mkdocs")
    return load("site_hooks", ROOT / "docs/site/build.py")


@pytest.fixture(scope="session")
def run_script() -> ModuleType:
    """Return `run.py`, whose commands a contributor runs."""
    return load("run_script", ROOT / "run.py")


@pytest.fixture(scope="session")
def modules(reference: ModuleType) -> griffe.ModulesCollection:
    """Return our packages with the descriptions that the site shows."""
    extensions = griffe.load_extensions(str(ROOT / "docs/site/descriptions.py"))
    paths = [ROOT / source for source in reference.SOURCES]
    loader = griffe.GriffeLoader(extensions=extensions, search_paths=paths, docstring_parser="google")
    for package in {name.partition(".")[0] for name in reference.public_names()}:
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection
