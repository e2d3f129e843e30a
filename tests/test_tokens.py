"""Counting tokens: the estimate, tokenizers of the caller, and slow tokenizers learned in the background."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import warmprefix.tokens
import warmprefix_kv_events.background_counter
from redis_servers import wait_until
from result_files import read_rows
from warmprefix import Templates
from warmprefix.tokens import CheckedCounter, as_counter, estimated_tokens
from warmprefix_kv_events.background_counter import BackgroundCounter
from warmprefix_kv_events.spans import EngineTokenizer
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

NOTE = Templates().order_annotation([f"Doc_{number}" for number in range(10, 25)])

# -- the estimate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "grouping", "digit_wise"),
    [
        ("[7] ", 3, 3),
        ("[Doc_1] ", 5, 5),
        ("[ctx-2f235f] ", 8, 10),
        (NOTE, 104, 119),
        (Templates().order_annotation([str(number) for number in range(10, 25)]), 74, 89),
        (Templates().order_annotation([str(number) for number in range(100, 115)]), 74, 104),
        (Templates().location_annotation(["Doc_1", "Doc_2"]), 21, 22),
        ('Most relevant above: the passage with "The sky is".', 12, 13),
    ],
)
def test_notes_and_labels_lie_between_real_tokenizers(text: str, grouping: int, digit_wise: int) -> None:
    """The counts are those of cl100k, with up to three digits per token, and of Qwen or Mistral, with one."""
    assert 0.9 * digit_wise <= estimated_tokens(text) <= 1.3 * grouping


def test_a_note_costs_more_with_each_label() -> None:
    labels = [f"ctx-{number:06x}" for number in range(0, 16**6, 16**6 // 20)]
    counts = [estimated_tokens(Templates().order_annotation(labels[:number])) for number in range(1, 21)]
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("text", ["word " * 2_000, "aB" * 5_000, "[1] > " * 2_000, "\n \n" * 3_000, "ố" * 10_000])
def test_the_estimate_is_linear(text: str) -> None:
    once, twice = estimated_tokens(text), estimated_tokens(text + text)
    assert abs(twice - 2 * once) <= 0.01 * twice + 2


@given(st.text(alphabet=st.characters()))
def test_each_text_has_a_plausible_estimate(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    assert min(size, 1) <= estimated_tokens(text) <= max(2 * size, 0)


def test_the_empty_text_has_no_tokens() -> None:
    assert estimated_tokens("") == 0
    assert estimated_tokens(" ") == 1


# -- tokenizers of the caller ------------------------------------------------------------------------------------------


class Tokenizer:
    """Counts characters, and adds two special tokens by default, as Hugging Face's do."""

    def encode(self, text: str, pair: str | None = None, add_special_tokens: bool = True) -> list[int]:
        return [0] * (len(text) + 2 * add_special_tokens)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text), "attention_mask": self.encode(text)}


class Ordinary:
    """Refuses special tokens in `encode`, as tiktoken does."""

    def encode(self, text: str) -> list[int]:
        raise ValueError(text)

    def encode_ordinary(self, text: str) -> list[int]:
        return [0] * len(text)


class Index:
    def __index__(self) -> int:
        return 4


@pytest.mark.parametrize(
    "tokenizer", [len, list, Tokenizer(), Ordinary(), SimpleNamespace(encode=list), lambda text: Index()]
)
def test_all_kinds_of_tokenizers_count(tokenizer: Any) -> None:
    assert as_counter(tokenizer)("four") == 4


def test_no_tokenizer_is_the_estimate() -> None:
    assert as_counter(None) is estimated_tokens


@pytest.mark.parametrize("tokenizer", ["cl100k_base", b"gpt2", 7, SimpleNamespace(encode=3), object()])
def test_as_counter_names_what_is_no_tokenizer(tokenizer: object) -> None:
    name = type(tokenizer).__name__
    with pytest.raises(
        TypeError, match=rf"tokenizer must be None, a callable or an object with encode\(\), got {name}"
    ):
        as_counter(tokenizer)


@pytest.mark.parametrize("value", [None, 2.0, True, "ab", b"ab", {"input_ids": [1]}])
def test_a_counter_refuses_what_is_no_count(value: object) -> None:
    with pytest.raises(TypeError, match="must return tokens or their number"):
        as_counter(lambda text: value)("ab")


# -- checked counters --------------------------------------------------------------------------------------------------


class Failures:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class PanicException(BaseException):
    """A panic of a tokenizer in Rust."""


def raising(error: BaseException) -> Callable[[str], int]:
    def count(text: str) -> int:
        raise error

    return count


@pytest.mark.parametrize("value", [-1, 0, True, 2.0, None, "7", 10**9, len(NOTE) + 5])
def test_nonsense_is_counted_and_replaced_by_the_estimate(value: Any) -> None:
    failures = Failures()
    counter = CheckedCounter(lambda text: value, failures.add)
    assert [counter(NOTE), counter(NOTE)] == [estimated_tokens(NOTE)] * 2
    assert failures.count == 2


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), PanicException("index out of bounds")])
def test_an_error_is_counted_and_replaced_by_the_estimate(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failures = Failures()
    counter = CheckedCounter(raising(error), failures.add)
    with caplog.at_level(logging.DEBUG):
        assert [counter(NOTE), counter(NOTE)] == [estimated_tokens(NOTE)] * 2
    assert failures.count == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_is_no_failure(error: type[BaseException]) -> None:
    failures = Failures()
    with pytest.raises(error):
        CheckedCounter(raising(error()), failures.add)("text")
    assert failures.count == 0


@pytest.mark.parametrize(("text", "count"), [("", 0), ("", 2), (" ", 0), ("ab", 6), ("\ud800", 3), ("é", 1)])
def test_plausible_counts_are_kept(text: str, count: int) -> None:
    failures = Failures()
    assert CheckedCounter(lambda _: count, failures.add)(text) == count
    assert failures.count == 0


def test_short_texts_are_counted_once() -> None:
    texts: list[str] = []

    def count(text: str) -> int:
        texts.append(text)
        return len(text)

    counter = CheckedCounter(count, lambda: None)
    for text in ("[1] ", "[2] ", "[1] ", "x" * 501, "x" * 501):
        assert counter(text) == len(text)
    assert texts == ["[1] ", "[2] ", "x" * 501, "x" * 501]


def test_the_memory_of_counts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.tokens, "_CACHED_TEXTS", 2)
    texts: list[str] = []

    def count(text: str) -> int:
        texts.append(text)
        return 1

    counter = CheckedCounter(count, lambda: None)
    for text in ("a", "b", "a", "c", "a", "b"):
        counter(text)
    assert texts == ["a", "b", "c", "a", "b"]


def test_a_failure_is_not_remembered() -> None:
    counts = iter([-1, 3])
    counter = CheckedCounter(lambda text: next(counts), lambda: None)
    assert [counter("[ab] "), counter("[ab] "), counter("[ab] ")] == [estimated_tokens("[ab] "), 3, 3]


# -- slow tokenizers ---------------------------------------------------------------------------------------------------


class Engine:
    """A slow tokenizer that can wait, fail and be watched; it counts characters."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: BaseException | None = None

    def __call__(self, text: str) -> int:
        self.texts.append(text)
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        return len(text)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(warmprefix_kv_events.background_counter, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(warmprefix_kv_events.background_counter, "_LONGEST_PAUSE_SECONDS", 0.004)
    return Engine()


@pytest.fixture
def counter(engine: Engine) -> Iterator[BackgroundCounter]:
    counter = BackgroundCounter(engine, max_entries=20)
    yield counter
    engine.go_on.set()
    counter.close()


def learn(counter: BackgroundCounter, text: str) -> None:
    wait_until(lambda: counter(text) == len(text), f"{text!r} is learned")


def test_a_call_does_not_wait(engine: Engine, counter: BackgroundCounter) -> None:
    engine.go_on.clear()
    assert counter(NOTE) == estimated_tokens(NOTE)
    wait_until(lambda: engine.texts == [NOTE], "the tokenizer is called")
    assert [counter(NOTE), counter("[1] ")] == [estimated_tokens(NOTE), 3]
    engine.go_on.set()
    learn(counter, NOTE)
    learn(counter, "[1] ")
    assert engine.texts == [NOTE, "[1] "]


def test_new_texts_get_the_estimate_times_the_ratio(counter: BackgroundCounter) -> None:
    for number in range(10):
        learn(counter, f"A sentence with number {number} in it.")
    text = "Another sentence without any."
    ratio = counter(text) / estimated_tokens(text)
    assert 0.4 * len(text) / estimated_tokens(text) < ratio < len(text) / estimated_tokens(text)
    assert counter("") == 0


def test_the_engines_tokenizer_is_learned() -> None:
    with EmulatorServer(EmulatorConfig()) as server:
        counter = BackgroundCounter(EngineTokenizer(server.base_url))
        exact = len(EngineTokenizer(server.base_url)(NOTE))
        assert counter(NOTE) == estimated_tokens(NOTE) != exact
        wait_until(lambda: counter(NOTE) == exact, "the note is learned")
        counter.close()
    assert counter.failures == 0


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tokens.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with EmulatorServer(EmulatorConfig()) as server:
        names: dict[str, Any] = {"base_url": server.base_url}
        exec(compile(example, "tokens.md", "exec"), names)
    assert capsys.readouterr().out == "5\n"
    assert names["failures"] == []


def test_the_figures_of_the_page_are_those_of_the_benchmark() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "tokens.md").read_text(encoding="utf-8")
    parts = [f"token_estimates_{part}" for part in ("labels", "notes", "wordings", "texts", "ids")]
    notes = {row["what"]: row for part in parts for row in read_rows(part)}
    for shown, what in {
        "label `[ctx-2f235f]`": "[ctx-2f235f] ",
        "order of 15 x `[12]`": "order, 15 x [12]",
        "order of 15 x `[ctx-2f235f]`": "order, 15 x [ctx-2f235f]",
        "`Best first: 4, 1, 7.`": "Best first: 4, 1, 7.",
        "Python": "Python",
        "UUIDs": "UUID",
        "Chinese": "Chinese",
    }.items():
        row = notes[what]
        errors = [f"{100 * error:+.0f} %" for error in (*row["estimate_error"].values(), row["bytes_error"]["mean"])]
        (line,) = re.findall(rf"^\| {re.escape(shown)} \|(.*)\|$", page, re.MULTILINE)
        assert [cell.strip() for cell in line.split("|")][-4:] == errors


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("no JSON"), PanicException()])
def test_a_failure_is_counted_and_tried_again(engine: Engine, counter: BackgroundCounter, error: BaseException) -> None:
    engine.error = error
    wait_until(lambda: counter("[1] ") == 3 and counter.failures >= 4, "several calls fail")
    engine.error = None
    learn(counter, "[1] ")


def test_pauses_grow(engine: Engine, counter: BackgroundCounter) -> None:
    engine.error = OSError("no route")
    pauses = []
    for _ in range(5):
        counter._waiting["[1] "] = None
        pauses.append(counter._learn())
    assert pauses == [0.001, 0.002, 0.004, 0.004, 0.004]
    engine.error = None
    counter._waiting["[1] "] = None
    assert counter._learn() == 3600.0
    assert counter.failures == 5


@pytest.mark.parametrize("value", [-1, 0, 10**6, None, 1.5])
def test_nonsense_is_not_learned(value: Any) -> None:
    counter = BackgroundCounter(lambda text: value)
    assert counter("[1] ") == 3
    wait_until(lambda: counter.failures == 1, "the count is refused")
    assert counter("[1] ") == 3
    counter.close()


def test_learned_and_waiting_texts_are_bounded(engine: Engine, counter: BackgroundCounter) -> None:
    engine.go_on.clear()
    for number in range(1_000):
        counter(f"[{number}] ")
    assert len(counter._waiting) <= warmprefix_kv_events.background_counter._MAX_WAITING
    counter("long " * 1_000)
    engine.go_on.set()
    wait_until(lambda: not counter._waiting, "all are counted")
    wait_until(lambda: len(counter._counts) == 20, "the last ones are remembered")
    assert "long " * 1_000 not in engine.texts


def test_nothing_is_asked_after_close(engine: Engine, counter: BackgroundCounter) -> None:
    learn(counter, "[1] ")
    counter.close()
    counter.close()
    assert (counter("[1] "), counter("[2] ")) == (4, 3)
    assert engine.texts == ["[1] "]
    assert not counter._waiting


def test_the_thread_ends_with_the_counter(engine: Engine) -> None:
    counter = BackgroundCounter(engine)
    learn(counter, "[1] ")
    thread = counter._ticker._thread
    assert thread is not None
    assert thread.daemon
    gone = weakref.ref(counter)
    del counter
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_no_thread_starts_before_the_first_call(engine: Engine) -> None:
    assert BackgroundCounter(engine)._ticker._thread is None


def test_without_a_thread_the_estimate_is_left(counter: BackgroundCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert counter("[1] ") == 3
    assert counter.failures == 1


def test_the_counts_of_a_background_counter_are_not_frozen(counter: BackgroundCounter) -> None:
    assert as_counter(counter) is counter
    checked = CheckedCounter(as_counter(counter), lambda: None)
    assert checked("") == 0
    assert checked("[1] ") == 3
    wait_until(lambda: checked("[1] ") == 4, "the label is learned")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_goes_on_learning(engine: Engine, counter: BackgroundCounter) -> None:
    learn(counter, "[1] ")
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            counter("[1] ")

    thread = threading.Thread(target=count)  # holds the counter's lock most of the time
    thread.start()
    child = os.fork()
    if not child:
        status = 1
        try:
            assert counter("[1] ") == 4
            learn(counter, "[2] ")
            status = 0
        finally:
            os._exit(status)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), (2.5, TypeError)])
def test_max_entries_is_checked(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_entries must be"):
        BackgroundCounter(len, max_entries=value)


def test_a_background_counter_checks_its_tokenizer() -> None:
    with pytest.raises(TypeError, match="tokenizer must be None, a callable"):
        BackgroundCounter("http://engine")
