"""Result files: only measured rows change, and each row records where it was measured."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import plugin_hit_ratio
import result_files
from result_files import RESULTS, Row, measured_all, read_rows, write_results, write_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a test's results."""
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    return tmp_path


FIELDS = st.text(st.characters(codec="utf-8", exclude_characters=":\r\n\0"), min_size=1).filter(
    lambda name: name not in ("run", "made")
)
CELLS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = CELLS | st.lists(CELLS) | st.dictionaries(FIELDS, CELLS, min_size=1)


@given(rows=st.lists(st.dictionaries(FIELDS, VALUES, min_size=1), min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_read_as_they_were_written(folder: Path, rows: list[Row]) -> None:
    result_files._write("b", rows)
    assert read_rows("b") == rows


def test_measured_rows_replace_only_rows_with_the_same_keys(folder: Path) -> None:
    write_rows("b", [{"what": "x", "us": 1}, {"what": "y", "us": 2}, {"what": "y", "us": 3}], ["what"])
    write_rows("b", [{"what": "z", "us": 4}, {"what": "y", "us": 5}], ["what"])
    assert [(row["what"], row["us"]) for row in read_rows("b")] == [("x", 1), ("y", 5), ("z", 4)]


def test_each_row_names_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/b.py", str(RESULTS / "day.jsonl.gz"), "--k", "8"])
    write_rows("b", [{"what": "x"}, {"what": "y", "made": {"versions": {"a": "1"}}}], ["what"])
    monkeypatch.setattr(sys, "argv", ["benchmarks/b.py"])
    write_rows("b", [{"what": "z"}], ["what"])
    runs = {row["run"]: row for row in result_files._read("runs")}
    first, second, third = (runs[row["run"]] for row in result_files._read("b"))
    assert second["versions"] == {"a": "1"}
    assert first["command"] == second["command"] == "benchmarks/b.py day.jsonl.gz --k 8"
    assert third["command"] == "benchmarks/b.py"
    assert set(first) >= {"commit", "processor", "python", "warmprefix"}


def test_every_row_of_the_results_names_a_run() -> None:
    runs = {row["run"] for row in result_files._read("runs")}
    files = {file.stem for file in RESULTS.glob("*.csv")} - {"runs"}
    assert {row["run"] for name in files for row in result_files._read(name)} == runs


def test_no_rows_change_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows("new", [], ["what"])
    assert not list(folder.iterdir())
    assert "nothing was measured: new.csv stays as it is" in capsys.readouterr().out


def test_a_whole_file_is_not_written_without_all_its_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured_all("b", "trace", [])
    write_results("b", [{"trace": "x"}, {"trace": "y"}])
    assert measured_all("b", "trace", [{"trace": name} for name in "zyx"])
    assert not measured_all("b", "trace", [{"trace": "y"}])
    assert "b.csv stays as it is: not measured were x" in capsys.readouterr().out


@pytest.mark.skipif(
    any(find_spec(module) is not None for module, _, _ in plugin_hit_ratio.PARTS.values()),
    reason="a framework is installed, and would be measured",
)
def test_rows_of_missing_frameworks_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "plugin_hit_ratio.csv"
    shutil.copy(RESULTS / path.name, path)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["plugin_hit_ratio.py"])
    plugin_hit_ratio.main()
    assert path.read_bytes() == before
    printed = capsys.readouterr().out
    for framework in plugin_hit_ratio.PARTS:
        assert f"{framework} is not installed: its rows stay as they are" in printed
