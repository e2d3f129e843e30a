"""`run_dataset` on a real Ray cluster, with emulators as replicas."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.integrations.ray.conftest import dataset_of, make_rows

from warmprefix import BatchPlan, ContextPlanner
from warmprefix.errors import BatchError
from warmprefix_ray import request_of_row, run_dataset
from warmprefix_tools.emulator import ChatMessage, block_hashes, render_chat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]
"""Ray uses what it has deprecated itself."""

MODEL = "warmprefix-emulator"


_ANSWERED = "vllm:request_success_total"


class Replica(NamedTuple):
    """An emulator in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    @property
    def requests(self) -> float:
        """Number of requests that it has finished; 0 if it is gone."""
        try:
            lines = httpx.get(self.url.replace("/v1", "/metrics")).text
        except httpx.TransportError:
            return 0
        return sum(
            float(line.split()[-1]) for line in lines.splitlines() if line.startswith("vllm:request_success_total")
        )


@contextmanager
def replicas(count: int) -> Iterator[list[Replica]]:
    """Run emulators that take no time, with a large cache."""
    rates = ["--base-ttft", "0", "--prefill-rate", "1e9", "--decode-rate", "1e9", "--kv-blocks", "1000000"]
    command = [sys.executable, "-m", "warmprefix_tools", "emulate", "--port", "0", *rates]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            announced = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert announced
            started.append(Replica(process, f"{announced[0]}/v1"))
        yield started


def hits_of_one_replica(plan: BatchPlan) -> float:
    """Return the hit ratio of a plan's prompts, one after the other, in a cache with the emulator's KV blocks."""
    held: set[bytes] = set()
    cached = total = 0
    for planned in plan:
        tokens = render_chat([ChatMessage(message["role"], message["content"]) for message in planned.messages()])
        hashes = list(block_hashes(tokens, 16))
        found = next((i for i, block in enumerate(hashes) if block not in held), len(hashes))
        cached += 16 * min(found, (len(tokens) - 1) // 16)  # the last token is always computed
        total += len(tokens)
        held.update(hashes)
    return cached / total


def ask(rows: Sequence[dict[str, Any]], folder: Path, urls: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Return the rows with their answers."""
    answered = run_dataset(dataset_of(rows), folder, urls, MODEL, max_tokens=1, retries=1, **options)
    return list(answered.iter_rows())


def test_every_request_is_answered_once_although_a_replica_dies(tmp_path: Path) -> None:
    count = 20_000
    rows = make_rows(count)
    with replicas(4) as running:

        def kill_one_midway() -> None:
            while sum(replica.requests for replica in running) < count / 3:
                time.sleep(0.05)
            running[1].process.kill()

        killer = threading.Thread(target=kill_one_midway)
        killer.start()
        answered = ask(rows, tmp_path, [replica.url for replica in running])
        killer.join()
        left = [replica.requests for replica in running]
    assert left[1] == 0
    answers = [row["answer"] for row in answered]
    assert Counter(answer["id"] for answer in answers) == Counter(row["id"] for row in rows)
    assert {row["answer"]["id"] == row["id"] for row in answered} == {True}
    assert {answer["error"] for answer in answers} == {None}
    assert sum(left) <= count  # the others were asked nothing twice
    single = ContextPlanner().plan_batch(map(request_of_row, rows))
    hits = sum(answer["cached_tokens"] for answer in answers) / sum(answer["prompt_tokens"] for answer in answers)
    assert hits > hits_of_one_replica(single) - 0.02


def test_finished_answers_are_not_asked_for_again(tmp_path: Path) -> None:
    rows = make_rows(60)
    with replicas(1) as [replica]:
        first = ask(rows, tmp_path, [replica.url])
        asked = replica.requests
        file = min(tmp_path.glob("answers-*/*.parquet"))
        assert ask(rows, tmp_path, [replica.url]) == first
        assert replica.requests == asked == 60
        file.unlink()
        assert len(ask(rows, tmp_path, [replica.url])) == 60
        assert 60 < replica.requests < 120


def test_a_run_without_any_replica_ends_with_the_reason_and_can_be_continued(tmp_path: Path) -> None:
    rows = make_rows(20)
    with pytest.raises(BatchError, match=r"all replicas are lost: .*APIConnectionError"):
        ask(rows, tmp_path, ["http://127.0.0.1:9/v1"])
    with replicas(1) as [replica]:
        assert len(ask(rows, tmp_path, [replica.url])) == 20


def test_rows_without_a_request_have_an_error(tmp_path: Path) -> None:
    rows = [*make_rows(5), {"id": "empty", "blocks": None, "question": "?"}]
    with replicas(1) as [replica]:
        answered = ask(rows, tmp_path, [replica.url])
    assert [row["answer"]["error"] is None for row in answered].count(True) == 5
    (failed,) = [row for row in answered if row["answer"]["error"] is not None]
    assert (failed["id"], failed["answer"]["id"]) == ("empty", None)


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="urls must have the URL of at least one replica"):
        ask(make_rows(1), tmp_path, [])
    with pytest.raises(ValueError, match="dataset must have no column `answer`"):
        ask([{"id": 1, "blocks": ["a"], "answer": 2}], tmp_path, ["http://127.0.0.1:9/v1"])
