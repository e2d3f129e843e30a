"""The pictures of the documentation are those that their scripts make."""

from __future__ import annotations

import os
import platform
import runpy
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

PICTURES = Path(__file__).parents[2] / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def script_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PICTURES))


@pytest.mark.slow
@pytest.mark.browser
def test_the_pages_can_be_photographed(tmp_path: Path) -> None:
    if os.environ.get("WARMPREFIX_NO_BROWSER"):
        pytest.skip("there is no browser")
    path = os.pathsep.join(filter(None, (str(PICTURES.parents[1] / "benchmarks"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(PICTURES / "screenshots.py"), str(tmp_path), "0.1"]
    subprocess.run(command, check=True, timeout=500, env={**os.environ, "PYTHONPATH": path})
    taken = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert set(taken) == {file.name for file in PICTURES.glob("page-*.png")}
    for picture in taken.values():
        assert struct.unpack(">II", picture[16:24]) == (1280, 800)
        assert len(picture) > 10_000  # an empty page takes less


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(__name__=name)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look themselves up there
    module.__dict__.update(runpy.run_path(str(PICTURES / f"{name}.py"), run_name=name))
    return module


def test_the_prompts_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert script("prompt", monkeypatch).picture() == (PICTURES / "prompt.svg").read_text(encoding="utf-8")


def test_the_diagrams_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("concepts.md", "conversations.md", "choice.md")
    pages = "".join((PICTURES.parent / name).read_text("utf-8") for name in names)
    for name, svg in script("diagrams", monkeypatch).diagrams().items():
        assert (PICTURES / name).read_text(encoding="utf-8") == svg
        assert f"(pictures/{name})" in pages


@pytest.mark.slow
def test_the_trees_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = (PICTURES / "tree.svg").read_text(encoding="utf-8")
    drawn = script("tree", monkeypatch).picture()
    if f"Python {platform.python_version()}." in committed:
        assert drawn == committed
    for svg in (drawn, committed):  # another version of Python has other texts
        shares = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text") if (text.text or "").endswith("% cached")]
        before, after = (int((share or "").partition("%")[0]) for share in shares)
        assert after > 1.3 * before > 0
