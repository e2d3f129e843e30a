"""Readers of public data sets: the texts to search, and the questions in their order."""

from __future__ import annotations

import ast
import csv
import io
import json
import random
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, islice
from typing import Any, NamedTuple

_MEETING_BLOCK_BYTES = 2_800
_CORPUS_BLOCK_BYTES = 3_200
_PROBLEMS = 2_500
_POST_BLOCK_BYTES = 1_000
_PAPER_BLOCK_BYTES = 640
_TICKET_BYTES = 1_200
_SECTION_BYTES = 1_600
_QUESTIONS_PER_POST = 8
_CHATS = 600

Line = Mapping[str, Any]
Data = Sequence[bytes]
"""The files of a source, in its order."""


class Question(NamedTuple):
    """A question, and what to search for."""

    text: str
    query: str
    conversation: int | None = None
    """None for a question that stands alone."""
    gold: Sequence[str] = ()
    """Texts that have the answer, where the data set names them."""


class Collection(NamedTuple):
    """Texts, and the questions that search these texts only."""

    texts: Sequence[str]
    questions: Sequence[Question]


Arrivals = Sequence["str | Question"]
"""Texts and questions by time; a question searches the texts that came before it."""
Documents = Sequence[tuple[str, Sequence[str]]]
"""Titles of documents, and their parts."""


def json_lines(file: bytes) -> Iterator[Any]:
    return (json.loads(line) for line in file.decode().splitlines() if line.strip())


def csv_rows(file: bytes) -> Iterator[dict[str, str]]:
    return csv.DictReader(io.StringIO(file.decode(), newline=""))


def alone(questions: Sequence[str]) -> list[Question]:
    return [Question(question, question) for question in questions]


def answered(questions: Iterable[tuple[str, Sequence[str]]]) -> list[Question]:
    """Return questions that stand alone, each with the texts that have its answer."""
    return [Question(question, question, gold=gold) for question, gold in questions]


# -- question answering ------------------------------------------------------------------------------------------------


def squad(data: Data) -> list[Collection]:
    """Return all paragraphs of files in the form of SQuAD, and all questions."""
    paragraphs = squad_paragraphs(data)
    asked = [(asked["question"], [paragraph["context"]]) for paragraph in paragraphs for asked in paragraph["qas"]]
    return [Collection([paragraph["context"] for paragraph in paragraphs], answered(asked))]


def squad_texts(data: Data) -> Iterator[Line]:
    """Yield the paragraphs, then the questions, each with its answers and the paragraph that has them."""
    paragraphs = squad_paragraphs(data)
    for number, paragraph in enumerate(paragraphs):
        yield {"block": number, "text": paragraph["context"]}
    asked = [(number, asked) for number, paragraph in enumerate(paragraphs) for asked in paragraph["qas"]]
    for query, (number, question) in enumerate(asked):
        answers = [answer["text"] for answer in question["answers"]]
        yield {"query": query, "text": question["question"], "answers": answers, "gold": [number]}


def squad_paragraphs(data: Data) -> list[Any]:
    articles = [article for file in data for article in json.loads(file)["data"]]
    return [paragraph for article in articles for paragraph in article["paragraphs"]]


def nq_open(data: Data) -> list[Collection]:
    """Return all questions; a text is a question with its answers."""
    (file,) = data
    records = list(json_lines(file))
    texts = [f"{record['question']}? {'; '.join(record['answer'])}" for record in records]
    asked = [(record["question"], [text]) for record, text in zip(records, texts, strict=True)]
    return [Collection(texts, answered(asked))]


def pubmed(data: Data) -> list[Collection]:
    """Return the sections of all abstracts."""
    (file,) = data
    articles = json.loads(file).values()
    texts = [section for article in articles for section in article["CONTEXTS"]]
    return [Collection(texts, answered([(article["QUESTION"], article["CONTEXTS"]) for article in articles]))]


def financial_reports(data: Data) -> list[Collection]:
    """Return tables and paragraphs of all reports; the questions stay in the reports' order."""
    (file,) = data
    texts: list[str] = []
    questions: list[Question] = []
    for report in json.loads(file):
        table = "\n".join(" | ".join(row) for row in report["table"]["table"])
        by_number = {str(paragraph["order"]): paragraph["text"] for paragraph in report["paragraphs"]}
        texts += [table, *by_number.values()]
        for asked in report["questions"]:
            gold = [table] * ("table" in asked["answer_from"]) + [
                by_number[number] for number in asked["rel_paragraphs"]
            ]
            questions += answered([(asked["question"], gold)])
    return [Collection(texts, questions)]


def fixed_sizes(data: Data) -> list[Collection]:
    """Return blocks of about 800 tokens of each corpus; the questions search all of them."""
    *corpora, table = data
    parts = [[*filled(re.split(r"(?<=\s)", corpus.decode()), _CORPUS_BLOCK_BYTES)] for corpus in corpora]
    whole = ["".join(own) for own in parts]
    asked: list[tuple[str, Sequence[str]]] = []
    for row in csv_rows(table):
        gold: list[str] = []
        for content in (quoted["content"] for quoted in json.loads(row["references"])):
            for text, own in zip(whole, parts, strict=True):
                if (start := text.find(content)) >= 0:
                    gold += overlapping(own, [(start, start + len(content))])
        asked.append((row["question"], gold))
    return [Collection([text for own in parts for text in own], answered(asked))]


def filled(parts: Sequence[str], most_bytes: int) -> Iterator[str]:
    """Yield runs of whole parts of at most `most_bytes`, or of one part that has more."""
    run, size = "", 0
    for part in parts:
        added = len(part.encode())
        if run and size + added > most_bytes:
            yield run
            run, size = "", 0
        run, size = run + part, size + added
    if run:
        yield run


# -- examples for the prompt -------------------------------------------------------------------------------------------


def labelled_utterances(data: Data) -> list[Collection]:
    """Return the labelled training utterances; the questions are the test utterances in random order.

    The file is sorted by label.
    """
    train, test = map(csv_rows, data)
    texts = [f"{row['text']} => {row['category']}" for row in train]
    questions = [row["text"] for row in test]
    random.Random(0).shuffle(questions)
    return [Collection(texts, alone(questions))]


def worked_problems(data: Data) -> list[Collection]:
    """Return the first 2,500 training problems with their solutions; the questions are the test problems."""
    train, test = map(json_lines, data)
    texts = [f"{problem['question']}\n{problem['answer']}" for problem in islice(train, _PROBLEMS)]
    return [Collection(texts, alone([problem["question"] for problem in test]))]


def shuffled(collection: Collection) -> Collection:
    """Return the questions in random order: their files are sorted by subject."""
    questions = list(collection.questions)
    random.Random(0).shuffle(questions)
    return Collection(collection.texts, questions)


def policies(data: Data) -> list[Collection]:
    """Return the segments of all privacy policies; the questions are in random order."""
    return [shuffled(*squad(data))]


def papers(data: Data) -> list[Collection]:
    """Return blocks of about 160 tokens of all papers; the questions are in random order."""
    texts: list[str] = []
    asked: list[tuple[str, Sequence[str]]] = []
    for paragraph in squad_paragraphs(data):
        own = [*filled(re.split(r"(?<=[.!?]\s)", paragraph["context"]), _PAPER_BLOCK_BYTES)]
        texts += own
        for each in paragraph["qas"]:
            spans = [
                (answer["answer_start"], answer["answer_start"] + len(answer["text"])) for answer in each["answers"]
            ]
            asked.append((each["question"], overlapping(own, spans)))
    return [shuffled(Collection(texts, answered(asked)))]


def overlapping(parts: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return the parts of a text that have a character of one of the spans."""
    ends = accumulate(map(len, parts))
    return [
        part
        for part, end in zip(parts, ends, strict=True)
        if any(first < end and end - len(part) < last for first, last in spans)
    ]


# -- releases of a documentation ---------------------------------------------------------------------------------------


def releases(data: Data, names: Sequence[str]) -> list[Collection]:
    """Return the sections of a documentation in several releases, with the release in their first line.

    The questions are the headings of the last release, in random order.

    Args:
        names: The release of each page.
    """
    texts: dict[str, list[str]] = {name: [] for name in names}
    headings: dict[str, list[str]] = {name: [] for name in names}
    for name, page in zip(names, data, strict=True):
        for heading, body in sections_of(page.decode()):
            headings[name].append(heading)
            parts = re.split(r"(?<=\n)\n+", body)
            texts[name] += [f"{name}, {heading}\n{part.strip()}" for part in filled(parts, _SECTION_BYTES)]
    every = [text for own in texts.values() for text in own]
    return [shuffled(Collection(every, alone(list(dict.fromkeys(headings[names[-1]])))))]


def sections_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield each section of a page in reStructuredText that has text: its heading behind the page's, and its text."""
    _, *found = re.split(r"^(\S.*)\n(?:={3,}|-{3,}|~{3,})\n", f"\n{page}", flags=re.MULTILINE)
    for heading, body in zip(found[::2], found[1::2], strict=True):
        if body.strip():
            yield heading if heading == found[0] else f"{found[0]}: {heading}", body.strip()


# -- texts that arrive over time ---------------------------------------------------------------------------------------


def posts(data: Data) -> Arrivals:
    """Return the posts by date; the first sentence of each of a post's first blocks is asked when it appears."""
    arrivals: list[str | Question] = []
    for file in sorted(data, key=_post_date):
        _, head, body = file.decode().split("---\n", 2)
        title = re.findall(r"^title: *(.*)$", head, re.MULTILINE)[0].strip("\"'")
        blocks = [f"{title}\n{block.strip()}" for block in filled(re.split(r"(?<=\n)\n+", body), _POST_BLOCK_BYTES)]
        arrivals += blocks
        for block in blocks[:_QUESTIONS_PER_POST]:
            arrivals += alone([re.split(r"(?<=[.!?:])\s", block.partition("\n")[2].strip("# \n"))[0]])
    return arrivals


def _post_date(file: bytes) -> str:
    date: bytes = re.findall(rb"^date: *([0-9-]+)", file, re.MULTILINE)[0]
    return date.decode()


def tickets(data: Data) -> Arrivals:
    """Return the tickets by date; each searches those before it, then it is one of them."""
    (file,) = data
    arrivals: list[str | Question] = []
    for ticket in sorted(csv_rows(file), key=lambda ticket: datetime.strptime(ticket["Created"], "%d/%b/%y %H:%M")):
        arrivals += alone([ticket["Summary"]])
        text = f"{ticket['Summary']}\n{ticket['Resolution']}\n{ticket['Description']}"
        arrivals.append(text.encode()[:_TICKET_BYTES].decode(errors="ignore"))
    return arrivals


def memories(data: Data) -> Arrivals:
    """Return an agent's tasks in their order; each searches the notes of earlier tasks, then adds its own.

    A note is a sentence of the instruction, or a call of a tool.
    """
    (file,) = data
    arrivals: list[str | Question] = []
    users: dict[str, int] = {}
    for call in ast.walk(ast.parse(file)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Task"):
            continue
        task = {argument.arg: argument.value for argument in call.keywords}
        user, instruction = ast.literal_eval(task["user_id"]), ast.literal_eval(task["instruction"])
        arrivals.append(Question(instruction, f"{user} {instruction}", users.setdefault(user, len(users))))
        arrivals += [f"{user}: {sentence}" for sentence in re.split(r"(?<=[.;])\s+", instruction) if sentence]
        arrivals += [f"{user}: {action}" for action in map(_tool_call, ast.iter_child_nodes(task["actions"])) if action]
    return arrivals


def _tool_call(action: ast.AST) -> str:
    if not isinstance(action, ast.Call):
        return ""
    name, arguments = (ast.literal_eval(argument.value) for argument in action.keywords[:2])
    return f"{name} {json.dumps(arguments)}"


# -- documents without questions ---------------------------------------------------------------------------------------


def abstract_sentences(data: Data) -> Documents:
    return [(paper["title"], paper["source"]) for file in data for paper in json_lines(file)]


def own_sentences(data: Data) -> list[Collection]:
    """Return the sentences of each abstract, which its title searches: no two questions share a text."""
    return [Collection(sentences, alone([title])) for title, sentences in abstract_sentences(data)]


def ticket_paragraphs(data: Data) -> Documents:
    (file,) = data
    return [
        (ticket["Summary"], [f"{ticket['Issue id']}: {part}" for part in re.split(r"\n\s*\n", ticket["Description"])])
        for ticket in csv_rows(file)
    ]


# -- memories and meetings ---------------------------------------------------------------------------------------------


def chat_turns(data: Data) -> list[Collection]:
    """Return the messages of each pair of speakers, with the questions about them."""
    collections: list[Collection] = []
    for chat in chats(data):
        messages = [message for session in sessions(chat, "") for message in session if message["text"]]
        noted = [(f"{message['speaker']}: {message['text']}", message["dia_id"]) for message in messages]
        collections.append(Collection([text for text, _ in noted], chat_questions(chat, noted)))
    return collections


def chat_facts(data: Data) -> list[Collection]:
    """Return the facts that were noted about each pair of speakers, with the questions about them."""
    collections: list[Collection] = []
    for chat in chats(data):
        facts = [fact for noted in sessions(chat, "_observation") for own in noted.values() for fact in own]
        noted = [(text, place) for text, places in facts for place in ([places] if isinstance(places, str) else places)]
        collections.append(Collection([text for text, _ in facts], chat_questions(chat, noted)))
    return collections


def chats(data: Data) -> Iterator[Any]:
    (file,) = data
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".json"):
                yield json.loads(archive.read(name))


def sessions(chat: Any, kind: str) -> Iterator[Any]:
    """Yield what the chat has of each session, by its number."""
    number = 1
    while (name := f"session_{number}{kind}") in chat:
        yield chat[name]
        number += 1


def chat_questions(chat: Any, noted: Sequence[tuple[str, str]]) -> list[Question]:
    """Return the questions about a chat; `noted` has texts, each with its place in the chat."""
    return answered(
        (asked["question"], [text for text, place in noted if place in asked.get("evidence", ())])
        for asked in chat["qa"]
    )


def meetings(data: Data) -> list[Collection]:
    """Return each meeting in blocks of whole turns, about 700 tokens long, with the questions about it."""
    return [
        Collection(
            list(
                filled(
                    [f"{turn['speaker']}: {turn['content']}\n" for turn in meeting["meeting_transcripts"]],
                    _MEETING_BLOCK_BYTES,
                )
            ),
            alone([asked["query"] for kind in ("general", "specific") for asked in meeting[f"{kind}_query_list"]]),
        )
        for file in data
        for meeting in json_lines(file)
    ]


def support_chats(data: Data) -> list[Collection]:
    """Return the passages of all conversations; each turn of a user searches with this turn and the one before."""
    (file,) = data
    tasks = list(json_lines(file))
    questions: list[Question] = []
    for number, task in enumerate(tasks):
        turns = [turn["text"] for turn in task["input"] if turn["speaker"] == "user"]
        for before, turn in zip(["", *turns], turns, strict=False):
            questions.append(Question(turn, f"{before} {turn}", number))
        questions[-1] = questions[-1]._replace(gold=[passage["text"] for passage in task["contexts"]])
    return [Collection([passage["text"] for task in tasks for passage in task["contexts"]], questions)]


def hotel_chats(data: Data) -> list[Collection]:
    """Return the reviews and answers of all places; each turn of a user searches with this turn and the one before.

    A chat that continues another one is left out.
    """
    places, logged = map(json.loads, data)
    texts: list[str] = []
    for place in (place for kind in places.values() for place in kind.values()):
        for review in place.get("reviews", {}).values():
            said = " ".join(review["sentences"].values())
            texts += [f"{place['name']}, {review.get('traveler_type', '')}: {said}"]
        texts += [f"{place['name']}: {asked['question']} {asked['answer']}" for asked in place["faqs"].values()]
    chats = dict.fromkeys(tuple(turn["text"] for turn in chat if turn["speaker"] == "U") for chat in logged)
    begun = {turns[:number] for turns in chats for number in range(len(turns))}
    questions = [
        Question(turn, f"{before} {turn}", number)
        for number, turns in enumerate(islice((turns for turns in chats if turns not in begun), _CHATS))
        for before, turn in zip(("", *turns), turns, strict=False)
    ]
    return [Collection(texts, questions)]


# -- tools and code ----------------------------------------------------------------------------------------------------


def tool_turns(data: Data) -> list[Collection]:
    """Return the descriptions of all tools; each turn of a conversation searches for its own tools."""
    tasks, *catalogues = data
    texts = [line for catalogue in catalogues for line in catalogue.decode().splitlines() if line.strip()]
    questions = [
        Question(message["content"], message["content"], number)
        for number, task in enumerate(json_lines(tasks))
        for turn in task["question"]
        for message in turn
    ]
    return [Collection(texts, questions)]


def api_references(data: Data) -> list[Collection]:
    """Return the references of all models, as published, and the tasks to find a model for."""
    references, asked = data
    texts = [line for line in references.decode().splitlines() if line.strip()]
    return [Collection(texts, alone([question["text"].strip(" \\n") for question in json_lines(asked)]))]


def functions(data: Data) -> list[Collection]:
    """Return all functions of the code base, and what users typed into a search engine."""
    code, *asked = data
    numbers = json.loads(code)
    by_number = {number: text for text, number in numbers.items()}
    queries = [query for file in asked for query in json.loads(file)]
    questions = answered((query["doc"], [by_number[query["retrieval_idx"]]]) for query in queries)
    return [Collection(list(numbers), questions)]


def tool_search(data: Data) -> list[Collection]:
    """Return all interfaces that the tasks list, without their examples; the tasks are in random order."""
    texts: list[str] = []
    asked: list[tuple[str, Sequence[str]]] = []
    for task in (task for file in data for task in json.loads(file)):
        own = [
            json.dumps({name: value for name, value in tool.items() if name != "template_response"})
            for tool in task["api_list"]
        ]
        texts += own
        names = [[tool["tool_name"], tool["api_name"]] for tool in task["api_list"]]
        gold = [text for text, name in zip(own, names, strict=True) if name in task.get("relevant APIs", ())]
        asked.append((task["query"], gold))
    return [shuffled(Collection(texts, answered(asked)))]


def tested_code(data: Data) -> list[Collection]:
    """Return all functions of a package; each of its tests searches for the code that it runs.

    There is one collection for each module of tests, all with the same texts.
    """
    modules = [file.decode() for file in data]
    parsed = [[*defined(module)] for module in modules]
    tests = [[text for name, text in module if name.startswith("test_")] for module in parsed]
    code = [text for module, tested in zip(parsed, tests, strict=True) if not tested for _, text in module]
    return [Collection(code, alone(questions)) for questions in tests if questions]


def defined(module: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each function of a module and of its classes; of a method, with its class."""
    lines = module.splitlines()
    tree = ast.parse(module)
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        prefix = f"class {scope.name}:\n" if isinstance(scope, ast.ClassDef) else ""
        for node in scope.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name, prefix + "\n".join(lines[node.lineno - 1 : node.end_lineno])
