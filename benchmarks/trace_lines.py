"""Lines of traces: retrieval as a data set publishes it, or with the demo's retriever."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeVar

from trace_texts import Arrivals, Collection, Data, Documents, Line, Question, json_lines
from warmprefix import ContextBlock
from warmprefix_tools.retriever import Bm25Retriever, content_words

MAX_REQUESTS = 2_000
_AT_ONCE = 10
"""Conversations, or users with texts of their own, that take turns."""
_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_CHINESE_OR_JAPANESE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+|[a-z0-9]+")
_SPACED = re.compile(r"[^\s!-/:-@\[-`{-~।‘’“”]+")

MORE_CANDIDATES = 12
"""Texts beyond `k` that a search returns: what a choice may feed instead."""

Words = Callable[[str], Iterator[str]]
Search = Callable[[str, int], Sequence[tuple[int, float]]]
"""Returns the places of the best texts for a query, at most so many, each with its score."""
T = TypeVar("T")


class Context(NamedTuple):
    """A question, and the texts that go with it, best first."""

    question: Question
    texts: Sequence[str]
    scores: Sequence[float] = ()
    k: int | None = None
    """The number of texts to feed; None for all of them."""


# -- retrieval that the data sets publish ------------------------------------------------------------------------------


def ragpulse_lines(data: Data) -> Iterator[Line]:
    """Yield the first 2,800 requests with three passages or more, by arrival; a repeated passage counts once."""
    passages, trace = map(json_lines, data)
    for passage in passages:
        yield {"block": passage["passage_id"], "tokens": passage["token_length"]}
    conversations: dict[str, int] = {}
    number = 0
    for request in sorted(trace, key=lambda request: float(request["timestamp"])):
        blocks = list(dict.fromkeys(request["hash_ids"]["passages_ids"]))
        if len(blocks) >= 3 and number < 2_800:
            conversation = conversations.setdefault(request["session_id"], len(conversations))
            yield {"request": number, "conversation": conversation, "blocks": blocks}
            number += 1


def tool_list_lines(data: Data) -> Iterator[Line]:
    """Yield the requests with their own lists of tools, in the published order."""
    (file,) = data
    contexts = [
        Context(
            Question("\n".join(message["content"] for turn in task["question"] for message in turn), ""),
            [json.dumps(tool) for tool in task["function"]],
        )
        for task in json_lines(file)
    ]
    return numbered(_texts(contexts), contexts)


def own_section_lines(data: Data) -> Iterator[Line]:
    """Yield the questions with the sections of their own abstracts; they hardly overlap."""
    (file,) = data
    articles = json.loads(file).values()
    contexts = [Context(Question(article["QUESTION"], ""), article["CONTEXTS"]) for article in articles]
    return numbered(_texts(contexts), contexts)


def own_part_lines(documents: Documents) -> Iterator[Line]:
    """Yield a request for each document of two parts or more, with all of its parts; no two requests overlap."""
    contexts = [Context(Question(title, ""), list(dict.fromkeys(parts))) for title, parts in documents]
    several = [context for context in contexts if len(context.texts) > 1]
    return numbered(_texts(several), several)


def service_result_lines(data: Data) -> Iterator[Line]:
    """Yield the turns in which a service returned two records or more, in the service's order."""
    dialogues = [dialogue for file in data for dialogue in json.loads(file)]
    contexts: list[list[Context]] = []
    for number, dialogue in enumerate(dialogues):
        contexts.append([])
        for asked, answered in zip(dialogue["turns"], dialogue["turns"][1:], strict=False):
            for frame in answered["frames"]:
                if len(records := frame.get("service_results", ())) >= 2:
                    question = Question(asked["utterance"], "", number)
                    contexts[-1].append(Context(question, [json.dumps(record) for record in records]))
    taken = list(taking_turns(contexts))
    return numbered(_texts(taken), taken)


def _texts(contexts: Sequence[Context]) -> Iterator[str]:
    return (text for context in contexts for text in context.texts)


# -- retrieval with a retriever of words -------------------------------------------------------------------------------


def searched(
    collections: Sequence[Collection],
    k: int,
    words: Words | None = None,
    most: int = MAX_REQUESTS,
    index: Callable[[Sequence[str]], Search] | None = None,
    *,
    with_texts: bool = False,
) -> Iterator[Line]:
    """Return the blocks and at most `most` requests; a question finds texts of its own collection.

    A request has `k` texts or fewer, and up to `MORE_CANDIDATES` behind them, with the scores of all.

    Args:
        words: Splits a text into words, for languages of which the retriever finds none.
        index: Makes a search of the texts; by default that of the demo.
        with_texts: True to write the texts of the blocks too.
    """
    streams: dict[tuple[int, int | None], list[Context]] = {}
    for number, collection in enumerate(collections):
        texts = list(dict.fromkeys(collection.texts))
        search = (index or word_search)([respelled(text, words) for text in texts])
        for question in collection.questions:
            found = search(respelled(question.query, words), k + MORE_CANDIDATES)
            context = Context(question, [texts[place] for place, _ in found], [score for _, score in found], k)
            streams.setdefault((number, question.conversation), []).append(context)
    texts_of_all = (text for collection in collections for text in collection.texts)
    return numbered(texts_of_all, list(taking_turns(list(streams.values())))[:most], with_texts=with_texts)


def searched_over_time(arrivals: Arrivals, k: int, latest: int | None = None) -> Iterator[Line]:
    """Return the blocks and the requests; a question finds texts that came before it, as many as with `searched`.

    Args:
        latest: Only this many of the texts before it are searched.
    """
    texts = [text for text in arrivals if isinstance(text, str)]
    search = word_search(texts)
    contexts: list[Context] = []
    came = 0
    for arrival in arrivals:
        if isinstance(arrival, str):
            came += 1
            continue
        since = 0 if latest is None else came - latest
        own: dict[str, float] = {}
        for place, score in search(arrival.query, len(texts)):
            if since <= place < came:
                own.setdefault(texts[place], score)
        found = dict(islice(own.items(), k + MORE_CANDIDATES))
        contexts.append(Context(arrival, [*found], [*found.values()], k))
    return numbered(texts, [context for context in contexts if context.texts][:MAX_REQUESTS])


def word_search(texts: Sequence[str]) -> Search:
    """Return the demo's search of the texts: BM25."""
    retriever = Bm25Retriever([ContextBlock(text, id=place) for place, text in enumerate(texts)])

    def search(query: str, most: int) -> list[tuple[int, float]]:
        return [(int(block.id or 0), score) for block, score in retriever.scored(query, most)]

    return search


def latent_search(texts: Sequence[str], dimensions: int = 200) -> Search:
    """Return a search by the cosine of dense vectors: latent semantic analysis of the texts' own words.

    Needs numpy. Another build of it may round a score differently.
    """
    import numpy as np

    counts = [Counter(content_words(text)) for text in texts]
    holders = Counter(word for count in counts for word in count)
    column = {word: number for number, word in enumerate(holders)}
    rarity = np.array([math.log(len(texts) / held) for held in holders.values()])

    def weights(count: Mapping[str, int]) -> Any:
        row = np.zeros(len(column))
        for word, times in count.items():
            if word in column:
                row[column[word]] = 1 + math.log(times)
        row *= rarity
        return row / (np.linalg.norm(row) or 1.0)

    rows = np.stack([weights(count) for count in counts])
    squares, vectors = np.linalg.eigh(rows @ rows.T)
    kept = np.flatnonzero(squares > 1e-9)[::-1][:dimensions]
    axes = rows.T @ vectors[:, kept] / np.sqrt(squares[kept])

    def placed(row: Any) -> Any:
        point = row @ axes
        return point / np.maximum(np.linalg.norm(point, axis=-1, keepdims=True), 1e-12)

    points = placed(rows)

    def search(query: str, most: int) -> list[tuple[int, float]]:
        cosines = np.round(points @ placed(weights(Counter(content_words(query)))), 4)
        best = sorted(range(len(texts)), key=lambda place: (-cosines[place], place))[:most]
        return [(place, float(cosines[place])) for place in best]

    return search


def respelled(text: str, words: Words | None) -> str:
    """Return the words in letters that the retriever reads: those of a word's bytes as hexadecimal digits."""
    if words is None:
        return text
    return " ".join(word.encode().hex().translate(_LETTERS) for word in words(text))


def spaced_words(text: str) -> Iterator[str]:
    return (found[0] for found in _SPACED.finditer(text.lower()))


def character_pairs(text: str) -> Iterator[str]:
    """Yield pairs of neighbouring Chinese or Japanese characters, and whole words of other letters."""
    for found in _CHINESE_OR_JAPANESE.finditer(text.lower()):
        run = found[0]
        if run.isascii():
            yield run
        else:
            yield from (run[start : start + 2] for start in range(max(1, len(run) - 1)))


def taking_turns(streams: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield the first item of each of ten streams, the second of each, and so on; then the next ten streams."""
    for start in range(0, len(streams), _AT_ONCE):
        for row in zip_longest(*streams[start : start + _AT_ONCE]):
            yield from (item for item in row if item is not None)


def numbered(texts: Iterable[str], contexts: Sequence[Context], *, with_texts: bool = False) -> Iterator[Line]:
    """Yield the blocks and the requests; equal texts are one block."""
    numbers: dict[str, int] = {}
    for text in texts:
        numbers.setdefault(text, len(numbers))
    for text, number in numbers.items():
        yield {"block": number, "tokens": ContextBlock(text).tokens, **({"text": text} if with_texts else {})}
    for number, (question, found, scores, k) in enumerate(contexts):
        line: dict[str, Any] = {"request": number}
        if question.conversation is not None:
            line["conversation"] = question.conversation
        line["query_tokens"] = ContextBlock(question.text).tokens
        line["blocks"] = list(dict.fromkeys(numbers[text] for text in found))
        if scores:
            line["scores"] = [round(score, 4) for score in scores]
        if k is not None:
            line["k"] = k
        if question.gold:
            line["gold"] = list(dict.fromkeys(numbers[text] for text in question.gold if text in numbers))
        yield line
