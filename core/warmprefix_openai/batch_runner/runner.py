"""`BatchRunner`: runs a planned batch, or exchanges it with a batch service as files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmprefix.batch import BatchPlan, PlannedRequest, Progress, no_progress
from warmprefix.errors import check_count
from warmprefix_openai.batch_runner.journal import BatchResult, Messages, digest_of_options
from warmprefix_openai.batch_runner.jsonl import file_ends, numbered, read_answers
from warmprefix_openai.outputs import text_file
from warmprefix_openai.primer import PrimeStats
from warmprefix_openai.retry import Retries

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["BatchRunner"]


class BatchRunner:
    """Runs one planned batch. It keeps only counts between its calls; several runs may go on side by side."""

    def __init__(self, batch: BatchPlan) -> None:
        """Take a batch; anything else raises a TypeError."""
        if not isinstance(batch, BatchPlan):
            raise TypeError(f"batch must be a BatchPlan, got {type(batch).__name__}")
        self._batch = batch
        self._prime_counts: Counter[str] = Counter()

    def prime_stats(self) -> PrimeStats:
        """Return the counts of the primes of all runs; see `BatchPlan.primes`."""
        return PrimeStats(**self._prime_counts)

    def run(
        self,
        client: AsyncOpenAI | Sequence[AsyncOpenAI],
        model: str,
        *,
        concurrency: int = 8,
        ordered: bool = True,
        journal: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        retries: int | Retries = 4,
        messages: Messages | None = None,
        timeout: float | None = None,
        **request: Any,
    ) -> AsyncGenerator[BatchResult, None]:
        """Ask all requests, and iterate over their results. Needs the extra `openai`.

        Requests start in execution order. One whose prefix another is to bring waits until that one is prefilled;
        meanwhile later ones may start, half as many as `concurrency` at most. Plans are committed as answers come,
        and abandoned where none does. The plan's primes go out in front of their requests; a failed prime is only
        counted. A request that fails for good yields a result with its `error`, and the batch goes on. Leaving early
        cancels the requests in flight; `contextlib.aclosing` leaves at once.

        Several clients, one for each replica of the model, get a part of the batch each, as `shards_of` cuts it. When a
        replica is lost, its unanswered requests go to the others, cut in the same way. A replica is lost when it has no
        server any more; when its first failure concerns all requests; or after ten such failures in a row.

        Args:
            client: One client, or one for each replica. Its own retries are not used.
            model: The model to ask.
            concurrency: Most requests in flight, for each client.
            ordered: Yield results in the order in which the requests were given; otherwise as they finish.
            journal: A file that keeps every answer. If it exists, it must be one of this batch, and its answers are not
                asked for again; failures are. The batch is the same if its requests, `model`, `messages` and `request`
                are, whatever the plan. Without it, results wait in memory for their turn: with `ordered`, up to all.
            progress: Called with `"requests"`, the number of finished requests, and the number of all.
            retries: Attempts after the first, with exponential backoff; or your own `Retries`.
            messages: Makes the chat for a request; `PlannedRequest.messages` by default.
            timeout: Seconds for a whole attempt; None leaves it to the client.
            **request: For `client.chat.completions.create`, with every request.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: There is no client, `concurrency` is below 1, `timeout` is not above 0, or `stream` is given.
            BatchError: While iterating, after the finished results: no server is there, or nothing is permitted, from
                the first request on or for ten in a row; of several replicas, at the last one.
            BatchFileError: While iterating: the journal is another batch's, or in use, or can't be used.
            MissingExtraError: The extra `openai` is not installed.
        """
        from warmprefix_openai.asking import ChatAsker
        from warmprefix_openai.batch_runner.asker import Asker
        from warmprefix_openai.batch_runner.run import BatchRun, open_journal

        check_count("concurrency", concurrency)
        if not isinstance(model, str):
            raise TypeError(f"model must be a str, got {type(model).__name__}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 or None, got {timeout}")
        if "stream" in request:
            raise ValueError(f"stream must be left out, because every run streams, got {request['stream']!r}")
        chat = PlannedRequest.messages if messages is None else messages
        policy = retries if isinstance(retries, Retries) else Retries(retries)
        clients = list(client) if isinstance(client, Sequence) else [client]
        if not clients:
            raise ValueError(f"client must be at least one client, got {client!r}")
        askers = [
            Asker(ChatAsker(one, timeout=timeout), model, request, chat, policy, self._prime_counts) for one in clients
        ]
        opening = None
        if journal is not None:
            opening = partial(open_journal, self._batch, journal, model, digest_of_options(request), chat)
        return BatchRun(self._batch, askers, concurrency, ordered, progress or no_progress).results(opening)

    def write_jsonl(
        self,
        path: str | os.PathLike[str],
        model: str,
        *,
        endpoint: str = "/v1/chat/completions",
        max_requests: int | None = None,
        max_bytes: int | None = None,
        messages: Messages | None = None,
        **body: Any,
    ) -> tuple[Path, ...]:
        """Write all requests, in execution order, as `vllm run-batch` and OpenAI's Batch API read them.

        Args:
            path: The file, gzipped if it ends in `.gz`. A second one would be `night-2.jsonl` next to `night.jsonl`.
            model: The model to ask.
            endpoint: The address of chat completions, from the server's root.
            max_requests: Most requests per file; OpenAI takes 50,000. A file ends where the next requests share least.
            max_bytes: Most bytes per file; OpenAI takes 200 MB.
            messages: Makes the chat for a request; `PlannedRequest.messages` by default.
            **body: For every request's body, such as `max_tokens`.

        Returns:
            The files, in execution order; one, unless a bound asks for more.

        Raises:
            TypeError: A bound is no int.
            ValueError: A bound is below 1 or below a single request, `endpoint` is not of chat completions, or `stream`
                is set.
            OutputError: A file can't be written.
        """
        chat = PlannedRequest.messages if messages is None else messages
        if not endpoint.endswith("/chat/completions"):
            raise ValueError(
                f"endpoint must end with /chat/completions, because the requests are chats, got {endpoint!r}"
            )
        check_count("max_requests", max_requests, optional=True)
        check_count("max_bytes", max_bytes, optional=True)
        if body.get("stream"):
            raise ValueError(f"stream must be left out of a batch file, got {body['stream']!r}")

        def line(planned: PlannedRequest) -> str:
            asked: dict[str, Any] = {**body, "model": model, "messages": list(chat(planned))}
            if planned.cache_salt is not None:
                asked["cache_salt"] = planned.cache_salt
            return json.dumps({"custom_id": planned.id, "method": "POST", "url": endpoint, "body": asked}) + "\n"

        sizes = [len(line(planned)) for planned in self._batch] if max_bytes is not None else [0] * len(self._batch)
        costs = [planned.saved_tokens if planned.warmed_by is not None else 0 for planned in self._batch]
        for planned, size in zip(self._batch, sizes, strict=True):
            if max_bytes is not None and size > max_bytes:
                raise ValueError(f"max_bytes must be {size} or more, for request {planned.id!r} alone, got {max_bytes}")
        written: list[Path] = []
        start = 0
        for end in file_ends(sizes, costs, max_requests, max_bytes):
            file = numbered(Path(path), len(written) + 1)
            with text_file(file) as write:
                for planned in self._batch.requests[start:end]:
                    write(line(planned))
            written.append(file)
            start = end
        return tuple(written)

    def read_jsonl(self, *paths: str | os.PathLike[str]) -> Iterator[BatchResult]:
        """Read the answers to the files of `write_jsonl`, in the order in which the requests were given.

        Takes output files of `vllm run-batch` or of OpenAI's Batch API, its error files among them, in any order. A
        request without a line yields a result whose `error` reports that. All files are checked before this returns;
        of their contents, one result at a time is in memory.

        Raises:
            BatchFileError: A line is no result, or of no request of this batch, or of one that has had a line before;
                or a file can't be read.
        """
        return read_answers(self._batch, paths)
