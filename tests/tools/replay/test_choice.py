"""Replays with chosen evidence: counts worked out by hand, and recounts of recorded requests with code of their own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmprefix import Choice, ContextPlanner
from warmprefix.errors import TraceError
from warmprefix_telemetry.trace_recorder import TraceRecorder
from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.replay.comparison import choice_summary
from warmprefix_tools.replay.results import EvidenceCounts
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.retriever import Bm25Retriever
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

Run = Callable[..., Any]

TOKENS: dict[BlockId, int] = dict.fromkeys("ABCDEF", 1_000)


def asked(number: int, candidates: str, *scores: float, gold: str = "", k: int | None = None) -> TraceRequest:
    return TraceRequest(number, tuple(candidates), scores=scores, gold=tuple(gold), k=k)


def by_hand(*requests: TraceRequest) -> Trace:
    return Trace("by-hand", requests, TOKENS)


CLOSE = by_hand(
    asked(0, "AB", 3.0, 2.0, gold="A"),
    asked(1, "CD", 3.0, 2.0),
    asked(2, "ACB", 3.0, 2.0, 1.95, gold="C"),  # B is resident behind A, and nearly as good as C
    asked(3, "ADB", 3.0, 2.0, 1.95, gold="BE"),
    asked(4, "AEB", 3.0, 2.0, 1.0, gold="AE"),  # B is much worse than E
)


def test_counts_of_a_choice_worked_out_by_hand() -> None:
    result = Replay(Workload(CLOSE, choose=parse_choice("k=2,keep=1,within=0.1"))).run_choice(None)
    assert [result.relevance.net_prefilled_tokens, result.chosen.net_prefilled_tokens] == [7_000, 5_000]
    assert result.first.net_prefilled_tokens == 7_000
    assert result.chosen.evidence == EvidenceCounts(
        fed=10,
        distinct=5,
        most_fed=4,  # A, in four of five
        exchanged=2,
        extra=0,
        twins=0,
        superseded=0,
        gold=6,
        gold_fed=4,
        gold_requests=4,
        gold_lost_requests=1,  # C
        gold_won_requests=1,  # B, in the fourth
    )
    relevance = result.relevance.evidence
    assert relevance is not None
    assert (relevance.fed, relevance.distinct, relevance.most_fed_share) == (10, 5, 0.4)
    assert (relevance.gold_fed, relevance.gold_share) == (4, 4 / 6)
    assert (relevance.exchanged, relevance.gold_lost_requests, relevance.gold_won_requests) == (0, 0, 0)
    assert result.first.evidence == relevance
    # There is one place to exchange, and one candidate for it.
    assert result.chance.evidence == result.chosen.evidence
    assert result.change == 5_000 / 7_000 - 1


def test_extra_passages_worked_out_by_hand() -> None:
    requests = by_hand(
        asked(0, "ABC", 3.0, 2.5, 2.0, k=3),
        asked(1, "ABC", 3.0, 2.0, 1.95, gold="C", k=2),
        asked(2, "AFC", 3.0, 2.0, 1.95, k=2),  # C is resident only behind B
    )
    result = Replay(Workload(requests, choose=parse_choice("keep=3,within=0.1,extra=1"))).run_choice(None)
    evidence = result.chosen.evidence
    assert evidence is not None
    assert (evidence.exchanged, evidence.extra, evidence.fed, evidence.gold_won_requests) == (0, 1, 8, 1)
    assert result.chosen.net_prefilled_tokens == result.first.net_prefilled_tokens == 4_000
    assert result.chosen.total_tokens == 8_000
    assert result.chosen.today_total_tokens == 7_000


def test_twins_worked_out_by_hand() -> None:
    texts: dict[BlockId, str] = {name: f"Docs {name}\nDig. {'Sow. ' * 20}" for name in ("1.0", "2.0", "3.0")}
    tokens = dict.fromkeys([*texts, "B", "C"], 1_000)
    requests = (
        TraceRequest(0, ("1.0", "2.0", "B", "C"), scores=(3.0, 2.5, 2.0, 1.0), gold=("2.0", "B")),
        TraceRequest(1, ("3.0", "B", "1.0", "C"), scores=(3.0, 2.5, 2.4, 2.3), gold=("3.0",)),
    )
    trace = Trace("twins", requests, tokens, texts=texts)
    result = Replay(Workload(trace, choose=parse_choice("k=3,twins=yes,within=0"))).run_choice(None)
    assert result.relevance.net_prefilled_tokens == 6_000
    assert result.chosen.prefilled_tokens == 2_000  # 1.0 and B, twice
    evidence = result.chosen.evidence
    assert evidence is not None
    assert (evidence.fed, evidence.distinct, evidence.exchanged, evidence.extra, evidence.twins) == (4, 2, 0, 0, 2)
    assert (evidence.gold, evidence.gold_fed, evidence.gold_lost_requests, evidence.gold_twins) == (3, 1, 2, 2)
    assert result.chance.evidence == evidence


def test_the_control_feeds_as_many_passages_as_the_choice(entries: tuple[LibraryEntry, ...]) -> None:
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    texts: dict[BlockId, str] = {}
    tokens: dict[BlockId, int] = {}
    requests = []
    for number, question in enumerate(ask(entries, 150, seed=6)):
        found: dict[BlockId, float] = {}
        for place, (block, score) in enumerate(retriever.scored(question.query, 10)):
            for version in ("3.1", "3.2")[(number + place) % 4 == 0 :]:
                name = f"{version} {block.fingerprint.hex()}"
                texts[name], tokens[name] = f"Python docs {version}\n{block.text}", block.tokens
                found[name] = score
        requests.append(TraceRequest(number, tuple(found), scores=tuple(found.values())))
    workload = Workload(
        Trace("versions", tuple(requests), tokens, texts=texts), choose=parse_choice(f"k=6,{OPTION},twins=yes")
    )
    fed: dict[str, list[int]] = {"chosen": [], "chance": []}
    result = Replay(workload).run_choice(
        10_000, observe=lambda arm: lambda request, order: fed.setdefault(arm, []).append(len(order.order))
    )
    assert fed["chosen"] == fed["chance"]
    evidence = result.chosen.evidence
    assert evidence is not None
    assert min(evidence.exchanged, evidence.extra, evidence.twins) > 0
    assert evidence.fed == sum(fed["chosen"])


def test_without_a_choice_a_request_feeds_its_own_first_blocks() -> None:
    requests = by_hand(asked(0, "ABCDE", 5, 4, 3, 2, 1, k=2), asked(1, "ABC", 3, 2, 1))
    assert [request.ids for request in Workload(requests).requests] == [("A", "B"), ("A", "B", "C")]
    assert [request.ids for request in Workload(requests, 1).requests] == [("A",), ("A",)]
    chosen = Workload(requests, 4, parse_choice("k=3"))
    assert [request.ids for request in chosen.requests] == [tuple("ABCD"), tuple("ABC")]
    assert [request.relevance for request in chosen.requests] == [(0, 1, 2), (0, 1, 2)]
    assert (chosen.k, chosen.candidates) == (3, 4)
    with pytest.raises(ValueError, match="workload must have a choice, got none"):
        Replay(Workload(requests)).run_choice(None)


@pytest.mark.parametrize(
    ("request_", "choose", "message"),
    [
        (asked(7, "AB", 2, 1), "keep=1", "by-hand: request 7 has no k, the number of blocks that it feeds"),
        (asked(7, "AB"), "k=1", "by-hand: request 7 has no scores to choose by"),
        (asked(7, "AB", 1, 2), "k=1", "by-hand: request 7: candidates must come with descending scores"),
        (asked(7, "AB", 2, 1), "k=1,scores=distance", "by-hand: request 7: candidates must come with ascending"),
        (asked(7, "AB", 2, 1), "k=1,twins=yes", "by-hand: it has no texts, by which twins are found"),
    ],
)
def test_a_trace_that_nothing_can_be_chosen_from_is_an_error(request_: TraceRequest, choose: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Workload(by_hand(request_), choose=parse_choice(choose))


def test_requests_that_nothing_can_be_chosen_for_are_fed_their_first_blocks() -> None:
    odd = [
        replace(
            asked(5, "ADB", 3.0, 2.0, 1.95, gold="D"), scores=()
        ),  # fed as it was found, because a score was missing
        asked(6, "AEFB", 1.0, 2.0, 3.0, 4.0, gold="F", k=3),
        asked(7, ""),
    ]
    option = parse_choice("k=2,keep=1,within=0.1")
    workload = Workload(by_hand(*CLOSE.requests, *odd), choose=option)
    assert [request.relevance for request in workload.requests[5:]] == [(0, 1), (0, 1), ()]
    result = Replay(workload).run_choice(None)
    alone = Replay(Workload(by_hand(*CLOSE.requests), choose=option)).run_choice(None)
    for run, plain in ((result.chosen, alone.chosen), (result.chance, alone.chance), (result.first, alone.first)):
        assert run.evidence is not None
        assert plain.evidence is not None
        assert (run.evidence.exchanged, run.evidence.fed) == (plain.evidence.exchanged, plain.evidence.fed + 4)
        assert run.evidence.gold_lost_requests == plain.evidence.gold_lost_requests
    assert [error.partition(" ")[2][:17] for error in result.errors] == ["5 has no scores t", "6: candidates mus"]
    assert choice_summary(result).endswith(
        "Nothing can be chosen for 2 requests, which count with their first passages: request 5 has no scores to "
        "choose by; `record` writes them if each block has one."
    )
    own = Workload(by_hand(asked(0, "AB", 2, 1, k=1), asked(1, "ABC")), choose=parse_choice(""))
    assert [request.relevance for request in own.requests] == [(0,), (0, 1, 2)]  # without a k, all were fed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=8;keep=3", "k must be an integer, got '8;keep=3'"),
        ("k", "k must be an integer, got ''"),
        ("k=0", "k must be 1 or more, got 0"),
        ("k=3,keep=9", "keep must be at most k, which is 3, got 9"),
        ("k=3,k=4", "--choose takes each field once, got k twice in 'k=3,k=4'"),
        ("places=3", "--choose takes k, keep, within, .*; got 'places=3'"),
        ("within=wide", "within must be a number, got 'wide'"),
        ("within=nan", "within must be from 0"),
        ("scores=cosine", "scores must be 'similarity' or 'distance', got 'cosine'"),
        ("twins=1", "twins must be yes or no, got '1'"),
        ("extra=-1", "extra must be 0 or more, got -1"),
    ],
)
def test_a_choice_that_cannot_be_read_is_an_error(run: Run, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_choice(text)
    result = run("replay", "day.jsonl", "--choose", text)
    assert result.returncode == 2
    assert "--choose" in result.stderr


def test_each_request_may_have_its_own_places() -> None:
    option = parse_choice(" keep = 3, extra=1 ,")
    assert option.of(8) == Choice(8, keep=3, extra=1)
    assert option.of(2) == Choice(2, keep=2, extra=1)
    assert option.of(None) is None
    assert parse_choice("k=4").of(8) == Choice(4)
    assert parse_choice("").of(8) == Choice(8)


# -- recorded requests: questions about the standard library ----------------------------------------------------------

K, CANDIDATES, CAPACITY = 4, 10, 20_000
CHOICE = Choice(K, keep=2, within=0.5, extra=1)
OPTION = "keep=2,within=0.5,extra=1"


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory, entries: tuple[LibraryEntry, ...]) -> tuple[Path, list[list[str]]]:
    """A trace of questions with candidates, texts and gold, and the texts that the planner fed, request by request."""
    path = tmp_path_factory.mktemp("recorded") / "day.jsonl"
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    fed: list[list[str]] = []
    clicks: list[dict[str, Any]] = []
    with TraceRecorder(path, text=True) as recorder:
        planner = ContextPlanner(capacity_tokens=CAPACITY, recorder=recorder)
        for number, question in enumerate(ask(entries, 200, seed=5)):
            found = [replace(block, score=score) for block, score in retriever.scored(question.query, CANDIDATES)]
            with planner.planning(found, choose=CHOICE) as plan:
                fed.append([planned.block.text for planned in plan.blocks])
            if number % 3:  # some answers cite a passage
                cited = recorder._lines.name(found[number % len(found)])[0]
                clicks.append({"request": plan.id, "gold": [cited]})
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(click) + "\n" for click in clicks)
    return path, fed


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def test_a_request_with_a_choice_is_recorded_with_its_candidates(day: tuple[Path, list[list[str]]]) -> None:
    trace = read_trace(day[0])
    assert {request.k for request in trace.requests} == {K}
    assert max(len(request.blocks) for request in trace.requests) == CANDIDATES
    assert all(len(request.scores) == len(request.blocks) for request in trace.requests)
    assert len({request.request for request in trace.requests}) == 200
    assert sum(bool(request.gold) for request in trace.requests) == 133


def test_the_replay_feeds_what_the_planner_fed(run: Run, day: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    path, fed = day
    run("replay", path, "--choose", OPTION, "--capacity-tokens", CAPACITY, "--orders-out", tmp_path / "orders")
    texts = read_trace(path).texts
    orders = [line["order"] for line in lines_of(tmp_path / "orders") if line["policy"] == "chosen"]
    assert [[texts[id] for id in order] for order in orders] == fed


def test_every_number_of_a_choice_can_be_recounted(run: Run, day: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    path, _ = day
    files = {name: tmp_path / name for name in ("numbers.json", "orders.jsonl", "page.html")}
    options = ["--json", files["numbers.json"], "--orders-out", files["orders.jsonl"], "--html", files["page.html"]]
    result = run("replay", path, "--choose", OPTION, "--capacity-tokens", CAPACITY, "--annotate", "none", *options)
    assert (result.returncode, result.stderr) == (0, "Replaying 1 trace, 6 runs each ...\n")
    (numbers,) = json.loads(files["numbers.json"].read_text())["choices"]
    assert (numbers["k"], numbers["requests"], numbers["capacity_tokens"]) == (K, 200, CAPACITY)
    assert numbers["candidates"] == CANDIDATES
    assert result.stdout.startswith("day: 200 requests, k = 4 of up to 10 candidates, placement head\n")
    lines = list(lines_of(path))
    tokens = {line["block"]: line["tokens"] for line in lines if "block" in line}
    gold = {line["request"]: set(line["gold"]) for line in lines if "gold" in line}
    asked = [line for line in lines if "blocks" in line]
    orders: dict[str, list[list[BlockId]]] = {
        "relevance": [],
        "chosen": [],
        "chance": [],
        "coaccess": [],
    }
    for line in lines_of(files["orders.jsonl"]):
        orders.get(line["policy"], []).append(line["order"])
    assert sum(map(len, gold.values())) == numbers["chosen"]["gold"] == 133
    top = round(len({id for order in orders["relevance"] for id in order}) / 100)
    for arm, policy in (("relevance", "relevance"), ("first", "coaccess"), ("chosen", "chosen"), ("chance", "chance")):
        counts: Counter[str] = Counter()
        feeds = Counter(id for order in orders[policy] for id in order)
        for request, order in zip(asked, orders[policy], strict=True):
            first, fed = set(request["blocks"][:K]), set(order)
            assert len(fed) == len(order)
            assert set(request["blocks"][:2]) <= fed <= set(request["blocks"])
            counts["exchanged"] += len(first - fed)
            counts["extra"] += len(fed) - len(first)
            scores = dict(zip(request["blocks"], request["scores"], strict=True))
            last, best = scores[request["blocks"][:K][-1]], scores[request["blocks"][0]]
            assert all(last - scores[id] <= 0.5 * (best - last) + 1e-9 for id in fed)
            cited = gold.get(request["request"], set())
            counts["gold_fed"] += len(cited & fed)
            counts["gold_lost_requests"] += bool(cited & first - fed)
            counts["gold_won_requests"] += bool(cited & fed - first)
        expected = numbers[arm]
        assert {name: expected[name] for name in counts} == dict(counts)
        assert expected["computed_tokens"] == computed(orders[policy], tokens, CAPACITY)
        assert (expected["fed"], expected["distinct"]) == (feeds.total(), len(feeds))
        assert expected["most_fed"] == sum(times for _, times in feeds.most_common(top))
    chosen = numbers["chosen"]
    assert chosen["computed_tokens"] < numbers["chance"]["computed_tokens"]
    assert chosen["computed_tokens"] < numbers["first"]["computed_tokens"] < numbers["relevance"]["computed_tokens"]
    assert chosen["exchanged"] > 20
    assert (chosen["exchanged"], chosen["extra"]) == (numbers["chance"]["exchanged"], numbers["chance"]["extra"])
    assert f"{chosen['computed_tokens']:,}" in result.stdout
    assert f"{chosen['gold_lost_requests']} would lack a passage of gold" in " ".join(result.stdout.split())
    page = files["page.html"].read_text()
    assert "Evidence chosen in view of the cache" in page
    assert f"<td>{chosen['computed_tokens']:,}</td>" in page


def computed(orders: Sequence[Sequence[BlockId]], tokens: dict[BlockId, int], capacity: int) -> int:
    """Return the tokens that an LRU cache of prefixes does not hold."""
    cache: dict[tuple[BlockId, ...], None] = {}  # least recently used first
    missed = 0
    for order in orders:
        prefixes = [tuple(order[: i + 1]) for i in range(len(order))]
        held = next((i for i, prefix in enumerate(prefixes) if prefix not in cache), len(prefixes))
        missed += sum(tokens[prefix[-1]] for prefix in prefixes[held:])
        for prefix in reversed(prefixes):
            cache.pop(prefix, None)
            cache[prefix] = None
        while sum(tokens[prefix[-1]] for prefix in cache) > capacity:
            del cache[next(iter(cache))]
    return missed


def test_a_trace_without_gold_has_no_column_of_it(run: Run, tmp_path: Path) -> None:
    lines = [
        {"name": "plain", "k": 2},
        *({"block": id, "tokens": 50} for id in "abc"),
        *({"request": n, "blocks": ["a", "b", "c"], "scores": [3, 2, 1.9]} for n in range(3)),
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = run("replay", tmp_path / "t.jsonl", "--choose", "k=2", "--policies", "relevance", "--html", tmp_path / "p")
    assert (result.returncode, result.stderr) == (0, "Replaying 1 trace, 8 runs each ...\n")
    assert "chosen, ordered" in result.stdout
    assert "gold\n" not in result.stdout
    assert "lost" not in result.stdout.split("gross:")[0]
    assert "leave as much to prefill as ordering what relevance feeds, and as much to prefill as" in " ".join(
        result.stdout.split()
    )
    assert run("replay", tmp_path / "t.jsonl", "--choose", "keep=1").stderr.startswith("plain: request 0 has no k")
