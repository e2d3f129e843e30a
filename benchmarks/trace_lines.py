"""Lines of traces: retrieval as a data set publishes it, or with the demo's retriever."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, TypeVar

from trace_texts import Arrivals, Collection, Data, Documents, Line, Question, json_lines
from warmprefix import ContextBlock
from warmprefix_tools.retriever import Bm25Retriever

MAX_REQUESTS = 2_000
_AT_ONCE = 10
"""Conversations, or users with texts of their own, that take turns."""
_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_CHINESE_OR_JAPANESE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+|[a-z0-9]+")
_SPACED = re.compile(r"[^\s!-/:-@\[-`{-~।‘’“”]+")

Words = Callable[[str], Iterator[str]]
Context = tuple[Question, Sequence[str]]
"""A question, and the texts that go with it, best first."""
T = TypeVar("T")


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
        (
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
    contexts = [(Question(article["QUESTION"], ""), article["CONTEXTS"]) for article in articles]
    return numbered(_texts(contexts), contexts)


def own_part_lines(documents: Documents) -> Iterator[Line]:
    """Yield a request for each document of two parts or more, with all of its parts; no two requests overlap."""
    contexts = [(Question(title, ""), list(dict.fromkeys(parts))) for title, parts in documents]
    several = [context for context in contexts if len(context[1]) > 1]
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
                    contexts[-1].append((question, [json.dumps(record) for record in records]))
    taken = list(taking_turns(contexts))
    return numbered(_texts(taken), taken)


def _texts(contexts: Sequence[Context]) -> Iterator[str]:
    return (text for _, texts in contexts for text in texts)


# -- retrieval with the demo's retriever -------------------------------------------------------------------------------


def searched(
    collections: Sequence[Collection], k: int, words: Words | None = None, most: int = MAX_REQUESTS
) -> Iterator[Line]:
    """Return the blocks and at most `most` requests; a question finds `k` texts or fewer of its own collection.

    Args:
        words: Splits a text into words, for languages of which the retriever finds none.
    """
    streams: dict[tuple[int, int | None], list[Context]] = {}
    for number, collection in enumerate(collections):
        texts = list(dict.fromkeys(collection.texts))
        retriever = Bm25Retriever([ContextBlock(respelled(text, words), id=place) for place, text in enumerate(texts)])
        for question in collection.questions:
            found = retriever.retrieve(respelled(question.query, words), k)
            context = [texts[int(block.id or 0)] for block in found]
            streams.setdefault((number, question.conversation), []).append((question, context))
    texts_of_all = (text for collection in collections for text in collection.texts)
    return numbered(texts_of_all, list(taking_turns(list(streams.values())))[:most])


def searched_over_time(arrivals: Arrivals, k: int, latest: int | None = None) -> Iterator[Line]:
    """Return the blocks and the requests; a question finds `k` texts or fewer that came before it.

    Args:
        latest: Only this many of the texts before it are searched.
    """
    texts = [text for text in arrivals if isinstance(text, str)]
    retriever = Bm25Retriever([ContextBlock(text, id=place) for place, text in enumerate(texts)])
    contexts: list[Context] = []
    came = 0
    for arrival in arrivals:
        if isinstance(arrival, str):
            came += 1
            continue
        since = 0 if latest is None else came - latest
        found = (int(block.id or 0) for block in retriever.retrieve(arrival.query, len(texts)))
        own = dict.fromkeys(texts[place] for place in found if since <= place < came)
        contexts.append((arrival, [*islice(own, k)]))
    return numbered(texts, [context for context in contexts if context[1]][:MAX_REQUESTS])


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


def numbered(texts: Iterable[str], contexts: Sequence[Context]) -> Iterator[Line]:
    """Yield the blocks and the requests; equal texts are one block."""
    numbers: dict[str, int] = {}
    for text in texts:
        numbers.setdefault(text, len(numbers))
    for text, number in numbers.items():
        yield {"block": number, "tokens": ContextBlock(text).tokens}
    for number, (question, found) in enumerate(contexts):
        line: dict[str, Any] = {"request": number}
        if question.conversation is not None:
            line["conversation"] = question.conversation
        line["query_tokens"] = ContextBlock(question.text).tokens
        yield {**line, "blocks": list(dict.fromkeys(numbers[text] for text in found))}
