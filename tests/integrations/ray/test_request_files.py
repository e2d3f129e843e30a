"""`warmprefix plan-batch --ray`, and the files that it reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.integrations.ray.conftest import Row, dataset_of, make_rows
from typer.testing import CliRunner

from warmprefix_tools.cli import app
from warmprefix_tools.plan_batch import ray_plan
from warmprefix_tools.plan_batch.plan_batch_options import PlanBatchOptions
from warmprefix_tools.plan_batch.ray_plan import RequestFileError, dataset_of_files, request_of_line

IGNORED = pytest.mark.filterwarnings("ignore")
"""Ray uses what it has deprecated itself."""


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_ranges_of_a_file_have_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: str
) -> None:
    monkeypatch.setattr(ray_plan, "_RANGE_BYTES", size)
    lines = ["{}", "", '{"a": 1}', "x" * 100, " ", "\u00e4\u00f6"]
    file = tmp_path / "requests.jsonl"
    file.write_bytes(("\n".join(lines) + end).encode())
    found = [row for some in ray_plan._ranges(file) for row in ray_plan._lines(dict(some))]
    assert [row["line"].decode().rstrip("\n") for row in found] == ["{}", '{"a": 1}', "x" * 100, "\u00e4\u00f6"]
    data = file.read_bytes()
    assert all(data[row["byte"] :].startswith(row["line"]) for row in found)


def test_a_bad_line_is_named_with_its_place() -> None:
    row = {"file": "a.jsonl", "byte": 12, "line": b'{"id": 1}'}
    with pytest.raises(ValueError, match=r"a\.jsonl, byte 12: KeyError: 'blocks'"):
        request_of_line(row)


@pytest.mark.parametrize("names", [[], ["a.txt"], ["a.parquet", "b.jsonl"]])
def test_a_folder_must_have_files_of_one_kind(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(RequestFileError, match="there must be Parquet files or JSONL files"):
        dataset_of_files(tmp_path)
    with pytest.raises(RequestFileError):
        dataset_of_files(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ({"ray_local": True}, "--ray-local must be left out without --ray"),
        ({"partition_requests": 5}, "--partition-requests must be left out without --ray"),
        ({"ray": Path("job"), "limit": 5}, "--limit must be left out with --ray"),
        ({"ray": Path("job"), "partition_requests": 0}, "--partition-requests must be 1 or more"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, object], described: str) -> None:
    with pytest.raises(ValueError, match=described):
        PlanBatchOptions(Path("requests.jsonl"), **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@IGNORED
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_the_command_plans_files(tmp_path: Path, kind: str) -> None:
    rows: list[Row] = make_rows(90)
    source = tmp_path / "source"
    source.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "parquet":
        dataset_of(rows).write_parquet(str(source))
    elif kind == "jsonl":
        (source / "a.jsonl").write_text(text + "no JSON\n")
    else:
        (source / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    numbers = tmp_path / "numbers.json"
    options = ["--ray", tmp_path / "job", "--partition-requests", 40, "--json", numbers]
    result = CliRunner().invoke(app, list(map(str, ["plan-batch", source, *options])), catch_exceptions=False)
    assert result.exit_code == 0
    assert "90 requests" in result.stdout
    written = json.loads(numbers.read_text())
    assert (written["requests"], written["unreadable"]) == (90, kind == "jsonl")
    planned = [row for file in written["files"] for row in pq.read_table(file).to_pylist()]
    assert len(planned) == 90 + written["unreadable"]
    assert ("1 row without a request" in result.stdout) == (kind == "jsonl")
