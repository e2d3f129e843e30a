"""Result files: only measured rows change, and each row records where it was measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import common
import plugin_hit_ratio

RESULTS = Path(common.__file__).parent / "results"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a test's results."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_measured_rows_replace_only_rows_with_the_same_keys(folder: Path) -> None:
    common.write_rows("b", [{"what": "x", "us": 1}, {"what": "y", "us": 2}, {"what": "y", "us": 3}], ["what"])
    first = read(folder / "b.json")["results"]
    common.write_rows("b", [{"what": "z", "us": 4}, {"what": "y", "us": 5, "made": {"versions": {"a": "1"}}}], ["what"])
    second = read(folder / "b.json")["results"]
    assert [(row["what"], row["us"]) for row in second] == [("x", 1), ("y", 5), ("z", 4)]
    assert second[0] == first[0]
    assert second[1]["made"] == {**common.environment(), "versions": {"a": "1"}}
    assert set(second[2]["made"]) == set(common.environment()) >= {"commit", "processor", "python", "warmprefix"}


def test_the_command_names_files_without_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/b.py", str(RESULTS / "day.jsonl.gz"), "--k", "8"])
    assert common.environment()["command"] == "benchmarks/b.py day.jsonl.gz --k 8"
    for file in RESULTS.glob("*.json"):
        assert re.search(r'"command": "[^"]*(?<![\w.])/', file.read_text()) is None, file.name


def test_each_list_of_rows_is_merged_separately(folder: Path) -> None:
    common.write_rows("b", {"load": [{"server": "a", "n": 1}], "memory": [{"server": "a", "n": 2}]}, ["server"])
    first = read(folder / "b.json")["results"]
    common.write_rows("b", {"load": [{"server": "b", "n": 3}], "memory": []}, ["server"])
    second = read(folder / "b.json")["results"]
    assert second["memory"] == first["memory"]
    assert [(row["server"], row["n"]) for row in second["load"]] == [("a", 1), ("b", 3)]


def test_rows_of_the_older_form_keep_the_stamp_of_their_file(folder: Path) -> None:
    old = {"benchmark": "b", "environment": {"commit": "then", "cores": 2}, "results": [{"what": "x"}, {"what": "y"}]}
    old["results"].append({"what": "own", "commit": "earlier"})  # type: ignore[attr-defined]
    (folder / "b.json").write_text(json.dumps(old))
    common.write_rows("b", [{"what": "y"}], ["what"])
    rows = read(folder / "b.json")["results"]
    assert rows[0] == {"what": "x", "made": {"commit": "then", "cores": 2}}
    assert rows[1]["made"]["commit"] == common.commit()
    assert rows[2] == {"what": "own", "commit": "earlier"}


@pytest.mark.parametrize("nothing", [[], {}, {"load": [], "memory": []}])
def test_no_rows_change_no_file(folder: Path, nothing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    common.write_rows("new", nothing, ["what"])
    assert not list(folder.iterdir())
    assert "nothing was measured: new.json stays as it is" in capsys.readouterr().out


def test_a_whole_file_is_not_written_without_all_its_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert common.measured_all("b", "rows", "trace", [])
    (folder / "b.json").write_text(json.dumps({"results": {"rows": [{"trace": "x"}, {"trace": "y"}]}}))
    assert common.measured_all("b", "rows", "trace", [{"trace": name} for name in "zyx"])
    assert not common.measured_all("b", "rows", "trace", [{"trace": "y"}])
    assert "b.json stays as it is: not measured were x" in capsys.readouterr().out


@pytest.mark.skipif(
    any(find_spec(module) is not None for module, _, _ in plugin_hit_ratio.PARTS.values()),
    reason="a framework is installed, and would be measured",
)
def test_rows_of_missing_frameworks_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "plugin_hit_ratio.json"
    shutil.copy(RESULTS / path.name, path)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["plugin_hit_ratio.py"])
    plugin_hit_ratio.main()
    assert path.read_bytes() == before
    printed = capsys.readouterr().out
    for framework in plugin_hit_ratio.PARTS:
        assert f"{framework} is not installed: its rows stay as they are" in printed
