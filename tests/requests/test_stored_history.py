"""References to what a server keeps: the same as if all of it were shown, and never to anything else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from warmprefix_requests import StoredHistory, restored, rewrite, stored_history

TEXTS = [f"The {name} is {size} metres deep on average. " * 9 for name, size in (("sea", 3688), ("lake", 30))]
TEXTS += ["short", '[Word for word the result of the earlier call read({"path":"a"}).]']
TEXTS += [f'[Word for word the result of the earlier call read({{"path":"{"x" * 190}…).]']

Json = dict[str, Any]


class Server:
    """Keeps the items of each response, as the API does; the client sees none of it."""

    def __init__(self) -> None:
        self.stored: dict[str | None, list[Json]] = {None: []}
        self.original: dict[str | None, list[Json]] = {None: []}
        """The same as the client meant it."""
        self.records: dict[str | None, StoredHistory | None] = {None: StoredHistory()}
        self.references = 0

    def ask(self, after: str | None, items: list[Json], output: list[Json], **fields: Any) -> str:
        """Send one request through `rewrite`, and store it; return the response's id."""
        body = {"input": items, **fields, **({} if after is None else {"previous_response_id": after})}
        earlier = self.records[after]
        made = rewrite("responses", body, earlier=earlier)
        if earlier is None and after is not None:
            assert made.body is body
        id = f"resp_{len(self.stored)}"
        self.stored[id] = [*self.stored[after], *made.body["input"], *output]
        self.original[id] = [*self.original[after], *items, *output]
        history = made.history and made.history.with_output(output)
        self.records[id] = None if history is None else StoredHistory.decode(history.encode())
        self.references += made.references
        return id

    def check(self, id: str | None) -> None:
        """Check that a reader of the server's items finds what the client meant; imitations are taken at their word."""
        read, meant = (restored("responses", {"input": items[id]}) for items in (self.stored, self.original))
        assert read == meant


def call(id: str, path: str, name: str = "read") -> Json:
    arguments = json.dumps({"path": path}, separators=(",", ":"))
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, "id": f"fc_{id}"}


def result(id: str, text: Any) -> Json:
    return {"type": "function_call_output", "call_id": id, "output": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def random_turns(chance: random.Random, server: Server, turns: int, *, forks: bool) -> None:
    """Let a client and a model talk: calls and results in parallel, errors, forks, cuts."""
    waiting: dict[str | None, list[str]] = {None: []}
    for number in range(turns):
        after = chance.choice(list(waiting)) if forks else list(waiting)[-1]
        items = [result(id, chance.choice(TEXTS)) for id in waiting[after]]
        chance.shuffle(items)
        for item in items:
            if chance.random() < 0.1:
                item |= {"status": "error"}
        items.append(user(f"question {number}"))
        ids = [f"call_{number}_{place}" for place in range(chance.randint(0, 3))]
        output: list[Json] = [
            call(id, chance.choice(["a", "b", "x" * 300]), chance.choice(["read", "run"])) for id in ids
        ]
        if forks and chance.random() < 0.03:
            output.insert(0, {"type": "compaction", "encrypted_content": "e"})
        fields = {"truncation": "auto"} if forks and chance.random() < 0.05 else {}
        waiting[server.ask(after, items, output, **fields)] = ids


@pytest.mark.parametrize("seed", range(30))
def test_references_are_the_same_as_in_a_history_that_is_shown(seed: int) -> None:
    server = Server()
    random_turns(random.Random(seed), server, 40, forks=False)
    last = list(server.stored)[-1]
    shown = rewrite("responses", {"input": server.original[last]}, earlier=None)
    texts = [item["output"] for item in shown.body["input"] if "output" in item]
    sent = [item["output"] for item in server.stored[last] if "output" in item]
    differ = [(one, other) for one, other in zip(texts, sent, strict=True) if one != other]
    assert all(one.startswith("[") for one, _ in differ)  # behind an imitation, fewer results are named
    assert len(differ) <= sum(text in TEXTS[3:] for text in texts)
    server.check(last)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("most", [6, 20, 512])
def test_every_branch_can_be_restored(seed: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_history, "_MAX_EVENTS", most)
    monkeypatch.setattr(stored_history, "_KEPT_EVENTS", most * 7 // 8)
    server = Server()
    random_turns(random.Random(seed), server, 60, forks=True)
    for id in server.stored:
        server.check(id)


def test_a_history_of_ten_thousand_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_history, "_MAX_EVENTS", 32)
    monkeypatch.setattr(stored_history, "_KEPT_EVENTS", 28)
    history: StoredHistory | None = StoredHistory()
    for number in range(10_000):
        assert history is not None
        body = {"input": [result(f"call_{number - 1}", f"Result {number}. " * 30)] if number else [user("Go.")]}
        made = rewrite("responses", {**body, **({"previous_response_id": "r"} if number else {})}, earlier=history)
        assert made.history is not None
        path = "always" if number % 3 == 0 else f"file-{number}"
        history = made.history.with_output([call(f"call_{number}", path)])
    assert history is not None
    assert len(history.events) <= 32
    assert history.calls == 10_000
    assert len(history.encode()) < 6_000


def test_a_second_result_behind_a_compaction_means_that_the_history_is_not_known() -> None:
    items = [
        call("a", "sea"),
        result("a", TEXTS[0]),
        {"type": "compaction", "encrypted_content": "e"},
        result("a", TEXTS[0]),
    ]
    assert rewrite("responses", {"input": items}, earlier=StoredHistory()).history is None
    more = [item for number in range(600) for item in (call(f"c{number}", str(number)), result(f"c{number}", TEXTS[0]))]
    assert rewrite("responses", {"input": [*items, *more]}, earlier=StoredHistory()).history is None


def test_a_call_made_all_the_time_does_not_drive_out_the_others() -> None:
    server = Server()
    id: str | None = None
    for number in range(600):
        path = "rare" if number == 50 else "polled"
        output = [call(f"call_{number}", path)]
        items = [] if number == 0 else [result(f"call_{number - 1}", TEXTS[0] if number == 51 else f"{number}" * 200)]
        id = server.ask(id, [user("Go."), *items], output)
    before = server.references
    id = server.ask(id, [result("call_599", TEXTS[0])], [])
    assert server.references == before + 1
    server.check(id)


@pytest.mark.parametrize("change", [b"", b"x", b"\x00" * 9])
def test_damaged_histories_are_refused(change: bytes) -> None:
    content = StoredHistory(references={"r": "k"}).encode()
    assert StoredHistory.decode(content).references == {"r": "k"}
    with pytest.raises(ValueError, match="damaged, or of another version"):
        StoredHistory.decode(content[:-5] + change if change else b"")
