"""The demo on a user's own documents, whatever is in their folder."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.demo import documents
from warmprefix_tools.demo.corpus import LEAST_TOKENS, MOST_TOKENS, tokens_of
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.documents import read_documents
from warmprefix_tools.demo.session import DemoTurn, prepare_session
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


def turns_of(path: Path, questions: int = 40) -> tuple[DemoTurn, ...]:
    return prepare_session(DemoOptions(documents=path, questions=questions)).turns


# -- the command -----------------------------------------------------------------------------------------------------


def test_command_measures_own_documents_and_explains_the_questions(run: Run, folder: Path) -> None:
    result = run("demo", "--documents", folder, "--questions", "12")
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    assert f"about 4 files of {folder}; BM25 finds the 10 best of their 32 passages." in text
    assert "The questions are made up: each is a phrase of a passage" in text
    assert "warmprefix record and warmprefix replay measure their real questions." in text
    assert "standard library" not in text
    assert result.stdout.count("tokens prefilled (net)") == 2


@pytest.mark.parametrize("name", ["empty", "only pictures", "numbers"])
def test_folder_without_text_is_one_line_with_status_2(run: Run, tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    root.mkdir()
    if name == "only pictures":
        (root / "a.png").write_bytes(b"\x89PNG\0")
        (root / "b.pdf").write_bytes(b"%PDF\0")
    if name == "numbers":
        numbers = "\n\n".join(" ".join(str(i * j) for j in range(1, 120)) for i in range(1, 60))
        (root / "numbers.txt").write_text(numbers)
    result = run("demo", "--documents", root)
    assert (result.returncode, result.stdout) == (2, "")
    message = result.stderr.splitlines()[-1]
    assert message.startswith(f"{root} is too little text: ")
    assert ", 0 of them with a sentence to ask about, in " in message
    assert "the demo needs 20 passages and 3 such sentences." in message
    assert ("2 of other formats (such as a.png)" in message) == (name == "only pictures")


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
    (folder / "bad.txt").write_bytes(b"\xff\xfe" + b"\x00\xd8" * 50)
    (folder / "short.md").write_text("# Title only\n")
    (folder / "z-copy.md").write_text((folder / "a.md").read_text())
    (folder / ".hidden.md").write_text(prose(50))
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "readme.md").write_text(prose(51))
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.txt")
    found = read_documents(folder)
    assert (found.files, len(found.passages)) == (4, 32)
    pipe = "1 not a regular file (such as pipe.txt)"
    copies = "2 without a passage that is long enough and new (such as short.md)"
    groups = ["2 binary (such as b1.txt)", "1 of an unknown encoding (such as bad.txt)", pipe]
    assert found.remarks == f" Left out: {', '.join(groups if hasattr(os, 'mkfifo') else groups[:2])} and {copies}."


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
    assert found.remarks == ""


def test_html_is_read_as_its_text_in_sections(tmp_path: Path) -> None:
    body = "".join(f"<h2>Part {seed}</h2><p>{prose(seed)} <a href='x'>a_b* &amp; c</a></p>" for seed in range(3))
    page = f"<html><head><title>No</title><style>p {{}}</style></head><body>{body}<script>no()</script></body></html>"
    (tmp_path / "page.html").write_bytes(page.replace("Part", "Größe").encode("latin-1"))
    found = read_documents(tmp_path)
    assert [passage.title for passage in found.passages] == ["Größe 0", "Größe 1", "Größe 2"]
    texts = [passage.block.text for passage in found.passages]
    assert all("a_b* & c" in text and "<" not in text and "no()" not in text for text in texts)


@pytest.mark.slow
def test_html_without_end_and_of_any_depth_is_read_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "deep.html").write_text("<div>" * 5_000 + prose(1))
    (tmp_path / "open.htm").write_text(f"<p>{prose(2)}<script>" + "<style" * 20_000)
    (tmp_path / "other.md").write_text(prose(3))
    found = read_documents(tmp_path)
    assert {passage.document for passage in found.passages} >= {"open.htm", "other.md"}
    assert found.remarks in ("", " Left out: 1 of HTML that is nested too deeply (such as deep.html).")


def test_links_end(folder: Path) -> None:
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self.md").symlink_to(folder / "self.md")
    (folder / "gone.md").symlink_to(folder / "absent.md")
    (folder / "linked.md").symlink_to(folder / "inner" / "a.MD")  # read first, so the file itself is a copy
    found = read_documents(folder)
    assert len(found.passages) == 32
    assert "2 unreadable (such as gone.md)" in found.remarks


def test_reading_stops_at_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "huge.txt").write_text("a" + "退" * 700_000)  # cut inside of a character
    (folder / "sparse.txt").write_text("x")
    os.truncate(folder / "sparse.txt", 50_000_000_000 if sys.platform == "linux" else 5_000_000)
    found = read_documents(folder)
    assert found.files == 5
    assert found.remarks == " Left out: 1 binary (such as sparse.txt)."
    for limit, value in (("_MAX_FILES", 2), ("_MAX_BYTES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(documents, limit, value)
            found = read_documents(folder)
        assert found.remarks == " Reading stopped at the limit of 2,000 files and 8 MB."
        assert found.files == (2 if limit == "_MAX_FILES" else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "[red]\x1b[31m\u202e"
    root.mkdir()
    for i, name in enumerate((b"\xff\n.md", b"[link=x]\x1b]0;t\x07.md", "退款.md".encode(), b"-rf.md", b"'; x.md")):
        path = os.fsencode(root) + b"/" + name
        with open(path, "w") as file:
            file.write(manual(range(10 * i, 10 * i + 6)))
    (root / "\x1b.txt").write_bytes(b"\0")
    result = run("demo", "--documents", root, "--questions", "8")
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


def test_questions_depend_on_files_only_and_find_the_passage_that_they_quote(folder: Path) -> None:
    turns = turns_of(folder)
    assert turns_of(folder) == turns
    found = [any(turn.question.text[:-1].lower() in each.text.lower() for each in turn.blocks) for turn in turns]
    assert sum(found) > 0.8 * len(turns)


def test_chinese_documents_are_asked_about_in_chinese(tmp_path: Path) -> None:
    file = tmp_path / "手册.md"
    file.write_text(manual(range(30), words=CHINESE, space="", end="。"), encoding="utf-8")
    turns = turns_of(file, questions=60)
    assert all(len(content_words(turn.question.text)) > 1 and not turn.question.text.isascii() for turn in turns)
    assert all(len(turn.blocks) == 10 for turn in turns)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("See `x_1 = f(2)`; 12.5 34.1 99, 100. SOME_NAME. https://a.example/b", set()),
        ("Die Rückgabe ist möglich, wenn die Ware neu ist.", {"Die Rückgabe ist möglich", "wenn die Ware neu ist"}),
        ("वापसी की अवधि पाँच दिन है।", {"वापसी की अवधि पाँच दिन है"}),
        ("Bad\x1b letters here now. Fine letters follow here.", {"Fine letters follow here"}),
    ],
)
def test_questions_are_clauses_of_letters(tmp_path: Path, text: str, expected: set[str]) -> None:
    numbers = " ".join(map(str, range(1_000, 1_100)))
    for n in range(3):
        (tmp_path / f"a{n}.md").write_text(f"{text}\n\n{n} {numbers}", encoding="utf-8")
    (tmp_path / "other.md").write_text(manual(range(20)))
    turns = turns_of(tmp_path, questions=300)
    marked = [turn for turn in turns if not any(word in turn.question.text.lower() for word in ENGLISH)]
    assert {turn.question.text.rstrip("?") for turn in marked} - {f"Part {n}" for n in range(20)} == expected
