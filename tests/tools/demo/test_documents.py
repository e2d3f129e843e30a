"""The demo on a user's own documents, whatever is in their folder."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.demo import DemoError, documents
from warmprefix_tools.demo.arms import DOCUMENT_INSTRUCTIONS
from warmprefix_tools.demo.corpus import LEAST_TOKENS, MOST_TOKENS, tokens_of
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.document_questions import phrases
from warmprefix_tools.demo.documents import Documents, read_documents
from warmprefix_tools.demo.session import DemoTurn, prepare_document_turns, prepare_session, run_session
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import content_words

Run = Callable[..., Any]

ENGLISH = [
    stem + end
    for stem in ("pay", "deliver", "print", "order", "pack", "bill")
    for end in ("ment", "er", "ing", "able", "ed", "less", "ful", "ly")
]
CHINESE = [
    "退款",
    "发票",
    "地址",
    "密码",
    "账户",
    "客户",
    "订单",
    "付款",
    "保修",
    "维修",
    "快递",
    "需要",
    "五个",
    "工作日",
]


def prose(seed: int, words: list[str] = ENGLISH, space: str = " ", end: str = ". ") -> str:
    """Return a paragraph of about 90 tokens."""
    rng = random.Random(seed)
    return "".join(space.join(rng.sample(words, 8)).capitalize() + end for _ in range(9))


def manual(seeds: range, **language: Any) -> str:
    return "\n\n".join(f"## Part {seed}\n\n{prose(seed, **language)}" for seed in seeds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with 32 passages in four files."""
    root = tmp_path / "manuals"
    (root / "inner").mkdir(parents=True)
    (root / "a.md").write_text(manual(range(8)))
    (root / "b.txt").write_text(manual(range(8, 16)))
    (root / "c.rst").write_text(manual(range(16, 24)))
    (root / "inner" / "a.MD").write_text(manual(range(24, 32)))
    return root


def left_out(found: Documents) -> dict[str, tuple[int, str]]:
    return {each.reason: (each.count, each.example) for each in found.left_out}


def turns_of(path: Path, **options: Any) -> tuple[DemoTurn, ...]:
    return prepare_document_turns(read_documents(path), DemoOptions(documents=path, **options))


# -- the command -----------------------------------------------------------------------------------------------------


def test_command_measures_own_documents_and_explains_the_questions(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = run("demo", "--documents", folder, "--questions", "12", "-k", "4", "--prefill-rate", "1e9", "--json", file)
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    assert f"about 4 files of {folder}; BM25 finds the 4 best of their 32 passages." in text
    assert "The questions are made up: each is a phrase of a passage" in text
    assert "warmprefix record and warmprefix replay measure their real questions." in text
    assert "standard library" not in text
    assert result.stdout.count("tokens prefilled (net)") == 2
    written = json.loads(file.read_text())
    assert written["documents"] == {"files": 4, "passages": 32, "left_out": {}, "limit": None}
    for arms in written["placements"].values():
        assert arms["relevance_order"]["requests"] == arms["warmprefix"]["requests"] == 12


def test_real_server_is_asked_about_documents_and_not_about_python(folder: Path) -> None:
    config = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with EmulatorServer(config) as server:
        options = DemoOptions(documents=folder, questions=3, k=4, placement="head", endpoint=server.base_url)
        result = asyncio.run(run_session(options, lambda name, steps: lambda: None, prepare_session(options)))
    assert result.emulator is None
    for served in (each for arm in result.runs["head"] for each in arm):
        assert re.match(rf"Session \d+\. {re.escape(DOCUMENT_INSTRUCTIONS)}\n\n", served.messages[0]["content"])
        assert (served.answer.prompt_tokens or 0) > 100


@pytest.mark.parametrize("name", ["empty", "only pictures"])
def test_folder_without_text_is_one_line_with_status_2(run: Run, tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    root.mkdir()
    if name != "empty":
        (root / "a.png").write_bytes(b"\x89PNG\0")
        (root / "b.pdf").write_bytes(b"%PDF\0")
    result = run("demo", "--documents", root)
    assert (result.returncode, result.stdout) == (2, "")
    message = result.stderr.splitlines()[-1]
    assert message.startswith(
        f"{root} is too little text: 0 passages in 0 files (.txt, .md, .rst, .html); the demo needs 20"
    )
    assert ("2 of other formats (such as a.png)" in message) == (name != "empty")


def test_missing_folder_is_one_line_with_status_2(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--documents", tmp_path / "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"Cannot read {tmp_path / 'nowhere'}: No such file or directory."


# -- reading ---------------------------------------------------------------------------------------------------------


def test_one_file_is_enough_whatever_its_suffix(tmp_path: Path) -> None:
    file = tmp_path / "handbook.adoc"
    file.write_text(manual(range(30)))
    found = read_documents(file)
    assert (found.files, {passage.document for passage in found.passages}) == (1, {"handbook.adoc"})
    assert len(turns_of(file, questions=20)) == 20


def test_unusable_files_are_counted_and_named_once(folder: Path) -> None:
    (folder / "b1.txt").write_bytes(b"\x7fELF\0\0 binary")
    (folder / "b2.txt").write_bytes(b"\0" * 50)
    (folder / "cut.txt").write_bytes(b"\xff\xfe" + prose(99).encode("utf-16-le")[:-1])
    (folder / "short.md").write_text("# Title only\n")
    (folder / "z-copy.md").write_text((folder / "a.md").read_text())
    (folder / ".hidden.md").write_text(prose(50))
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "readme.md").write_text(prose(51))
    found = read_documents(folder)
    assert (found.files, len(found.passages)) == (4, 32)
    assert left_out(found) == {
        "binary": (2, "b1.txt"),
        "of an unknown encoding": (1, "cut.txt"),
        "without a passage that is long enough and new": (2, "short.md"),
    }


GERMAN = "Die Wärmepumpe läuft über Nacht. Größe und Maße stehen im Handbuch für Geräte. "
SWEDISH = "Värmepumpen är på över natten. Åtgärd krävs för östra änden av huset. "
RUSSIAN = "Насос работает ночью. Размеры указаны в руководстве по прибору. "
JAPANESE = "ポンプは夜に動作します。大きさは説明書にあります。"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "latin-1"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-32"),
        (SWEDISH, "latin-1"),
        (RUSSIAN, "cp1251"),
        (JAPANESE, "shift_jis"),
    ],
)
def test_other_encodings_are_recognised(tmp_path: Path, text: str, encoding: str) -> None:
    (tmp_path / "manual.txt").write_bytes((text * 8).encode(encoding))
    found = read_documents(tmp_path)
    assert "".join(passage.block.text for passage in found.passages).startswith(text.strip())
    assert found.left_out == ()


def test_html_is_read_as_its_text_in_sections(tmp_path: Path) -> None:
    body = "".join(f"<h2>Part {seed}</h2><p>{prose(seed)} <a href='x'>a_b* &amp; c</a></p>" for seed in range(3))
    page = f"<html><head><title>No</title><style>p {{}}</style></head><body>{body}<script>no()</script></body></html>"
    (tmp_path / "page.html").write_bytes(page.replace("Part", "Größe").encode("latin-1"))
    found = read_documents(tmp_path)
    assert [passage.title for passage in found.passages] == ["Größe 0", "Größe 1", "Größe 2"]
    texts = [passage.block.text for passage in found.passages]
    assert all("a_b* & c" in text and "<" not in text and "no()" not in text for text in texts)


def test_html_without_end_and_of_any_depth_is_read_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "deep.html").write_text("<div>" * 5_000 + prose(1))
    (tmp_path / "open.htm").write_text(f"<p>{prose(2)}<script>" + "<style" * 20_000)
    (tmp_path / "other.md").write_text(prose(3))
    found = read_documents(tmp_path)
    assert {passage.document for passage in found.passages} >= {"open.htm", "other.md"}
    assert left_out(found) in ({}, {"of HTML that is nested too deeply": (1, "deep.html")})


def test_links_end(folder: Path) -> None:
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self.md").symlink_to(folder / "self.md")
    (folder / "gone.md").symlink_to(folder / "absent.md")
    (folder / "linked.md").symlink_to(folder / "inner" / "a.MD")  # read first, so the file itself is a copy
    found = read_documents(folder)
    assert len(found.passages) == 32
    assert left_out(found)["unreadable"] == (2, "gone.md")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_pipe_is_left_out(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    assert left_out(read_documents(folder)) == {"not a regular file": (1, "pipe.txt")}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_denied_files_and_folders_are_counted(folder: Path) -> None:
    (folder / "a.md").chmod(0)
    (folder / "inner").chmod(0)
    try:
        found = read_documents(folder)
        assert left_out(found) == {"unreadable": (2, "a.md")}
        with pytest.raises(DemoError, match=r"Cannot read .*inner: Permission denied"):
            read_documents(folder / "inner")
    finally:
        (folder / "inner").chmod(0o700)


def test_huge_file_is_read_up_to_a_limit_even_inside_a_character(folder: Path) -> None:
    (folder / "huge.txt").write_text("a" + "退" * 700_000)
    (folder / "sparse.txt").write_text("x")
    os.truncate(folder / "sparse.txt", 50_000_000_000 if sys.platform == "linux" else 5_000_000)
    found = read_documents(folder)
    assert left_out(found) == {
        "longer than 1 MB, read up to there": (1, "huge.txt"),
        "binary": (1, "sparse.txt"),
    }


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("_MAX_FILES", 2, "2 files"),
        ("_MAX_BYTES", 1, "0 MB"),
        ("_MAX_NAMES", 3, "3 names of files and folders"),
    ],
)
def test_reading_stops_at_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, message: str
) -> None:
    monkeypatch.setattr(documents, limit, value)
    found = read_documents(folder)
    assert found.limit == message
    assert 1 <= found.files < 4


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "[red]\x1b[31m\u202e"
    root.mkdir()
    for i, name in enumerate((b"\xff\n.md", b"[link=x]\x1b]0;t\x07.md", "退款.md".encode(), b"-rf.md", b"'; x.md")):
        path = os.fsencode(root) + b"/" + name
        with open(path, "w") as file:
            file.write(manual(range(10 * i, 10 * i + 6)))
    (root / "\x1b.txt").write_bytes(b"\0")
    result = run("demo", "--documents", root, "--questions", "8", "--placement", "head", "--prefill-rate", "1e9")
    assert result.returncode == 0
    assert "[red]\u2039U+001B\u203a[31m\u2039U+202E\u203a" in "".join(result.stdout.split("\n"))
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout)


# -- passages and questions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        manual(range(40)),
        "\n".join(prose(seed) for seed in range(40)),  # one paragraph of long lines
        " ".join(prose(seed) for seed in range(40)),  # one line
        "".join(prose(seed, CHINESE, "", "。") for seed in range(40)),  # one line without spaces
        "退" * 9_000,
        "x" * 30_000,
        "| a | b |\n" * 4_000,
        ("-" * 5_000 + "\n" + " " * 5_000 + "word " * 90 + "\n\n") * 20,
        "\r\n\r\n".join(prose(seed) for seed in range(40)),
        "# " * 20_000 + "\n" + prose(1),
    ],
    ids=["sections", "lines", "line", "chinese", "character", "word", "table", "ruled", "crlf", "hashes"],
)
def test_passages_have_about_the_size_of_the_library_s(tmp_path: Path, text: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode())
    found = read_documents(file).passages
    assert found
    for passage in found:
        assert LEAST_TOKENS <= tokens_of(passage.block.text) <= MOST_TOKENS + 2 * LEAST_TOKENS
        assert len(passage.block.text) < 10_000


def test_every_word_is_in_a_passage_and_headings_stay_with_their_text(folder: Path) -> None:
    found = read_documents(folder)
    texts = "\n\n".join(passage.block.text for passage in found.passages)
    for file in folder.rglob("*.*"):
        for line in file.read_text().splitlines():
            assert line in texts
    assert [passage.title for passage in found.passages[:3]] == ["Part 0", "Part 1", "Part 2"]
    assert found.passages[1].block.text.startswith("## Part 1\n\n")
    assert len({passage.block.id for passage in found.passages}) == len(found.passages)


def test_underlined_headings_are_titles(tmp_path: Path) -> None:
    file = tmp_path / "guide.rst"
    file.write_text(f"Refunds\n=======\n\n{prose(1)}\n\nRepairs\n-------\n\n{prose(2)}")
    assert [passage.title for passage in read_documents(file).passages] == ["Refunds", "Repairs"]


def test_questions_depend_on_files_and_seed_only(folder: Path) -> None:
    turns = turns_of(folder, questions=40, k=5)
    assert turns_of(folder, questions=40, k=5) == turns
    assert turns_of(folder, questions=40, k=5, seed=1) != turns


def test_most_questions_find_the_passage_that_they_quote(folder: Path) -> None:
    turns = turns_of(folder, questions=40, k=5)
    found = [any(turn.question.text[:-1].lower() in each.text.lower() for each in turn.blocks) for turn in turns]
    assert sum(found) > 0.8 * len(turns)


def test_chinese_documents_are_asked_about_in_chinese(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "手册.md"
    file.write_text(manual(range(30), words=CHINESE, space="", end="。"), encoding="utf-8")
    turns = turns_of(file, questions=60, k=5)
    assert all(len(content_words(turn.question.text)) > 1 and not turn.question.text.isascii() for turn in turns)
    assert all(len(turn.blocks) == 5 for turn in turns)
    result = run(
        "demo", "--documents", file, "--questions", "8", "-k", "5", "--placement", "tail", "--prefill-rate", "1e9"
    )
    assert result.returncode == 0
    assert "手册.md" in result.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See `x_1 = f(2)`; 12.5 34.1 99, 100.", ()),
        ("SOME_NAME. https://a.example/b", ()),
        (
            "Die Rückgabe ist möglich, wenn die Ware unbenutzt ist.",
            ("Die Rückgabe ist möglich", "wenn die Ware unbenutzt ist"),
        ),
        ("वापसी की अवधि पाँच दिन है।", ("वापसी की अवधि पाँच दिन है",)),
        ("Bad\x1b letters here now. Fine letters follow here.", ("Fine letters follow here",)),
    ],
)
def test_phrases_are_clauses_of_letters(text: str, expected: tuple[str, ...]) -> None:
    assert phrases(text) == expected


def test_tables_of_numbers_cannot_be_asked_about(tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("\n\n".join(" ".join(str(i * j) for j in range(1, 120)) for i in range(1, 60)))
    found = read_documents(file)
    assert len(found.passages) > 20
    with pytest.raises(DemoError, match=r"0 of them with a sentence to ask about.*; the demo needs 3 of these\."):
        prepare_document_turns(found, DemoOptions(documents=file))


def test_needed_number_of_passages_follows_k(folder: Path) -> None:
    found = read_documents(folder)
    assert prepare_document_turns(found, DemoOptions(documents=folder, k=16))
    with pytest.raises(DemoError, match=r"32 passages in 4 files .* needs 34 passages, twice the number"):
        prepare_document_turns(found, DemoOptions(documents=folder, k=17))
    one = replace(found, passages=found.passages[:1], files=1)
    with pytest.raises(DemoError, match=r"1 passage in 1 file "):
        prepare_document_turns(one, DemoOptions(documents=folder))
