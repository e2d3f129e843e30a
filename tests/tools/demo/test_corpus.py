"""The text: every public docstring of this Python, and no other text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from warmprefix.labels import label_candidates
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import LEAST_TOKENS, LibraryEntry, Parameter, passages, read_standard_library


def test_library_makes_many_blocks_of_retrievable_size(entries: tuple[LibraryEntry, ...]) -> None:
    blocks = [block for entry in entries for block in entry.blocks]
    assert len(blocks) > 1_000
    assert all(LEAST_TOKENS - 2 <= block.tokens <= 450 for block in blocks)
    assert sum(block.tokens > 350 for block in blocks) < len(blocks) / 100
    assert len(set(blocks)) == len(blocks)


def test_every_block_id_is_its_label_and_unique(entries: tuple[LibraryEntry, ...]) -> None:
    blocks = [block for entry in entries for block in entry.blocks]
    assert [next(label_candidates(block)) for block in blocks] == [block.id for block in blocks]
    assert len({block.id for block in blocks}) == len(blocks)


def test_entries_match_the_sources(entries: tuple[LibraryEntry, ...]) -> None:
    by_name = {entry.name: entry for entry in entries}
    dumps = by_name["json.dumps"]
    assert (dumps.module, dumps.kind) == ("json", "function")
    assert dumps.parameters[0] == Parameter("obj", optional=False)
    assert Parameter("skipkeys", optional=True) in dumps.parameters
    assert dumps.blocks[0].id == "json.dumps"
    assert dumps.blocks[0].text.startswith("json.dumps(obj, *, skipkeys=False")
    assert "Serialize ``obj`` to a JSON formatted ``str``." in dumps.blocks[0].text
    assert by_name["json"].kind == "module"
    assert by_name["threading.Condition"].kind == "class"
    assert any(entry.module == "decimal" for entry in entries)  # its docstrings are in _pydecimal
    assert all(parameter.name != "self" for entry in entries for parameter in entry.parameters)


def test_private_and_test_modules_are_left_out(entries: tuple[LibraryEntry, ...]) -> None:
    for entry in entries:
        parts = entry.name.split(".")
        assert not any(part.startswith("_") for part in parts), entry.name
        assert parts[0] not in {"test", "idlelib", "lib2to3", "site-packages", "turtledemo"}, entry.name


def test_names_are_sorted(entries: tuple[LibraryEntry, ...]) -> None:
    assert [entry.name for entry in entries] == sorted({entry.name for entry in entries})


def test_unreadable_files_are_left_out(small_library: Path, tmp_path: Path) -> None:
    shutil.copytree(small_library, tmp_path, dirs_exist_ok=True)
    whole = read_standard_library(tmp_path)
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "binary.py").write_bytes(b'"""\xff\xfe\x00"""')
    (tmp_path / "deep.py").write_text("(" * 10_000)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert read_standard_library(tmp_path) == whole


def test_python_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="standard library's docstrings"):
        read_standard_library(tmp_path)


def test_long_docstring_is_cut_between_paragraphs_without_loss() -> None:
    paragraphs = [f"Paragraph {i} has this and that. " * (5 + 7 * i % 11) for i in range(40)]
    docstring = "\n\n".join(paragraph.strip() for paragraph in paragraphs)
    blocks = passages("a.b", "a.b(c)", docstring)
    assert [block.id for block in blocks] == ["a.b", *(f"a.b:{i}" for i in range(2, len(blocks) + 1))]
    assert blocks[0].text.startswith("a.b(c)\n\n")
    bodies = [block.text.partition("\n\n")[2] for block in blocks]
    assert "\n\n".join(bodies) == docstring
    assert all(LEAST_TOKENS <= block.tokens <= 350 for block in blocks)


def test_long_paragraph_is_cut_between_lines() -> None:
    lines = [f"line {i} of a table without end" for i in range(200)]
    blocks = passages("t", "module t", "\n".join(lines))
    assert all(block.tokens <= 350 for block in blocks)
    assert [line for block in blocks for line in block.text.split("\n") if line.startswith("line")] == lines


def test_short_text_makes_no_block() -> None:
    assert passages("a.b", "a.b(c)", "Return c.") == ()
    assert passages("a.b", "a.b(c)", "") == ()
