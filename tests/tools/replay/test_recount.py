"""A model of a few lines counts the same hits, from the trace and the orders that the command writes."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix_baselines import POLICIES
from warmprefix_tools.replay.replay_options import ReplayOptions
from warmprefix_tools.replay.run_replay import run_replay

DOCS = Path(__file__).parents[3] / "docs/replay.md"

Key = tuple[Any, ...]


def recount(orders: list[tuple[str | None, list[Any]]], tokens: dict[Any, int], capacity: int | str) -> int:
    """Return the saved tokens of (scope, served order) pairs.

    The cache is a dict of prefixes, least recently used first; of those used at once, the longest first.
    """
    cache: dict[Key, None] = {}
    saved = 0
    for scope, order in orders:
        prefixes = [(scope, *order[: i + 1]) for i in range(len(order))]
        for prefix in prefixes:
            if prefix not in cache:
                break
            saved += tokens[prefix[-1]]
        for prefix in reversed(prefixes):
            cache.pop(prefix, None)
            cache[prefix] = None
        while capacity != "unbounded" and sum(tokens[prefix[-1]] for prefix in cache) > int(capacity):
            del cache[next(iter(cache))]
    return saved


IDS = st.one_of(st.integers(0, 7), st.sampled_from("abcdefgh"))


@st.composite
def traces(draw: st.DrawFn) -> tuple[dict[Any, int], list[dict[str, Any]]]:
    ids = draw(st.lists(IDS, min_size=1, max_size=10, unique=True))
    tokens = {id: draw(st.integers(0, 40)) for id in ids}
    contexts = draw(st.lists(st.lists(st.sampled_from(ids), max_size=6, unique=True), min_size=1, max_size=40))
    scopes = st.sampled_from([None, None, "one", "two"])
    return tokens, [{"request": f"r{i}", "blocks": blocks, "scope": draw(scopes)} for i, blocks in enumerate(contexts)]


@given(traces(), st.integers(1, 200), st.integers(1, 6))
@settings(max_examples=settings().max_examples // 3)
def test_hits_can_be_recounted_from_orders(
    trace: tuple[dict[Any, int], list[dict[str, Any]]], capacity: int, k: int
) -> None:
    tokens, requests = trace
    with tempfile.TemporaryDirectory() as folder:
        file, orders, numbers = (Path(folder, name) for name in ("t.jsonl", "orders.jsonl", "numbers.json"))
        blocks = [{"block": id, "tokens": length} for id, length in tokens.items()]
        file.write_text("".join(json.dumps(line) + "\n" for line in [{"name": "t"}, *blocks, *requests]))
        sizes = f"unbounded,{capacity}"
        options = ReplayOptions([file], "all", sizes, k=k, orders_out=orders, json_file=numbers)
        run_replay(options)
        results = json.loads(numbers.read_text())["results"]
        served: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
        for line in orders.read_text().splitlines():
            order = json.loads(line)
            assert order["trace"] == "t"
            served[order["policy"], order["capacity_tokens"]].append(order)

    assert len(results) == len(served) == 2 * len(POLICIES)
    for result in results:
        orders_of_run = served[result["policy"], result["capacity_tokens"]]
        assert [order["request"] for order in orders_of_run] == [request["request"] for request in requests]
        for order, request in zip(orders_of_run, requests, strict=True):
            assert sorted(order["order"], key=repr) == sorted(request["blocks"][:k], key=repr)
        pairs = [(request["scope"], order["order"]) for order, request in zip(orders_of_run, requests, strict=True)]
        assert result["saved_tokens"] == recount(pairs, tokens, result["capacity_tokens"])
        assert result["total_tokens"] == sum(tokens[id] for _, order in pairs for id in order)
        today = [(request["scope"], request["blocks"][:k]) for request in requests]
        assert result["today_saved_tokens"] == recount(today, tokens, result["capacity_tokens"])


def test_recount_in_the_docs_counts_the_same(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    documented: dict[str, Any] = {}
    exec(compile(code, "replay.md", "exec"), documented)
    file, orders, numbers = (tmp_path / name for name in ("t.jsonl", "orders.jsonl", "numbers.json"))
    rng = random.Random(0)
    lines: list[dict[str, Any]] = [{"name": "t"}, *({"block": i, "tokens": rng.randrange(100)} for i in range(20))]
    lines += [{"request": i, "blocks": rng.sample(range(20), 4)} for i in range(200)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_replay(ReplayOptions([file], "coaccess", "unbounded,400", orders_out=orders, json_file=numbers))
    results = json.loads(numbers.read_text())["results"]
    written = orders.read_text().splitlines()
    for i, result in enumerate(results):
        saved = documented["recount"](file, written[200 * i : 200 * (i + 1)], result["capacity_tokens"])
        assert saved == result["saved_tokens"] > 0
    assert results[0]["saved_tokens"] > results[1]["saved_tokens"]
