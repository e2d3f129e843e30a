"""Output files: complete, or absent."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from warmprefix_openai.outputs import OutputError, check_writable, text_file

FULL = Path("/dev/full")


@pytest.mark.parametrize("name", ["orders.jsonl", "orders.jsonl.gz"])
def test_a_file_appears_only_when_it_is_complete(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("older")
    with text_file(path) as write:
        write("Zeile\n")
        write("ü\n")
        assert path.read_text() == "older"
    data = path.read_bytes()
    assert (gzip.decompress(data) if name.endswith(".gz") else data) == "Zeile\nü\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["orders.jsonl", "orders.jsonl.gz"])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, name: str) -> None:
    def interrupted(write: Callable[[str], object]) -> None:
        write("half a line")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), text_file(tmp_path / name) as write:
        interrupted(write)
    assert list(tmp_path.iterdir()) == []


def test_compressed_bytes_do_not_depend_on_name_or_time(tmp_path: Path) -> None:
    paths = [tmp_path / "a.gz", tmp_path / "b.gz"]
    for path in paths:
        with text_file(path) as write:
            write("the same\n" * 1_000)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_device_is_written_to_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        with text_file(pipe) as write:
            write("through\n")
        assert os.read(reader, 100) == b"through\n"
    finally:
        os.close(reader)


def test_writing_to_a_link_writes_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "real" / "today.json")
    for text in ("first", "second"):
        check_writable(link)
        with text_file(link) as write:
            write(text)
        assert link.is_symlink()
        assert (tmp_path / "real" / "today.json").read_text() == text
    assert len(list((tmp_path / "real").iterdir())) == 1


def test_an_unwritable_path_fails_before_anything_runs(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    with pytest.raises(OutputError, match=r"Cannot write .*: it is a directory"):
        check_writable(tmp_path)
    with pytest.raises(OutputError, match=r"Cannot write .*: there is no directory .*missing"):
        check_writable(tmp_path / "missing" / "new.json")


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_raises_an_output_error() -> None:
    with pytest.raises(OutputError, match="Cannot write /dev/full: No space left on device"), text_file(FULL) as write:
        write("x" * 100_000)
