"""Public data sets as traces: fetched once from a server, with checked sums and their licence."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import fetch_traces
import plugin_hit_ratio
from fetch_traces import FetchError, make
from trace_lines import latent_search, searched, searched_over_time
from trace_sources import SOURCES, File, Source
from trace_texts import Collection, Question, defined, filled, posts, sections_of
from traces import files
from warmprefix_tools.traces.reader import read_trace


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode() + b"\n"


def logged(timestamp: int, session: str, *passages: int) -> dict[str, object]:
    hash_ids = {"sys_prompt": [9], "passages_ids": passages, "history": [], "web_search": [], "user_input": [8]}
    return {"timestamp": str(timestamp), "input_length": 99, "hash_ids": hash_ids, "session_id": session}


def asked(question: str, answer: str) -> dict[str, object]:
    return {"id": "1", "question": question, "answers": [{"answer_start": 0, "text": answer}]}


SKY = {"context": "Planets shine.", "qas": [asked("Who is it?", "Planets")]}

CHROMA = "chunking_evaluation/evaluation_framework/general_evaluation_data"
BFCL = "berkeley-function-call-leaderboard/bfcl_eval/data"


def squad(*articles: object) -> bytes:
    return json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs} for paragraphs in articles]}).encode()


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return buffer.getvalue()


def chat(speaker: str, hobby: str) -> str:
    return json.dumps(
        {
            "session_1": [{"speaker": speaker, "dia_id": "D1:1", "text": f"I went {hobby} today."}],
            "session_1_observation": {speaker: [[f"{speaker} likes {hobby}.", "D1:1"]]},
            "session_2": [{"speaker": speaker, "dia_id": "D2:1", "text": f"More {hobby}!"}],
            "qa": [
                {"question": f"Who likes {hobby}?", "evidence": ["D1:1"]},
                {"question": f"Is it about {hobby}?", "evidence": []},
            ],
        }
    )


def meeting(topic: str, turns: int) -> object:
    return {
        "general_query_list": [{"query": "Summarize the whole meeting.", "answer": ""}],
        "specific_query_list": [{"query": f"Summarize the discussion about {topic}.", "answer": ""}],
        "meeting_transcripts": [{"speaker": "Chair", "content": f"About {topic}. " * 100}] * turns,
    }


def message(speaker: str, text: str) -> object:
    return {"speaker": speaker, "text": text}


def dialogues(*results: list[str]) -> bytes:
    """Return one dialogue whose service returns these places, one list per turn."""
    turns: list[object] = []
    for places in results:
        turns.append({"speaker": "USER", "utterance": "Find a hotel.", "frames": [{"service": "Hotels_4"}]})
        records = [{"place_name": place, "city": "Sydney"} for place in places]
        turns.append({"speaker": "SYSTEM", "utterance": "Done.", "frames": [{"service_results": records}]})
    return json.dumps([{"turns": turns}]).encode()


def post(day: int, title: str, *paragraphs: str) -> bytes:
    head = f"---\ntitle: {title}\ndate: 2020-01-{day:02}\nby:\n- Ann\n---\n\n"
    return (head + "\n\n".join(paragraphs) + "\n").encode()


def page(path: str) -> bytes:
    return f"{path}\n====\n\nAbout {path}.\n\nSetup\n-----\n\nInstall {path}.\n\n.. toctree::\n".encode()


def listed(name: str) -> list[str]:
    """Return the paths in the repository of the files that a list of sums names."""
    return [inside(file.path) for file in SOURCES[name].files]


def inside(path: str) -> str:
    """Return the path in the repository, without its owner, name and commit."""
    return path.split("/", 3)[3]


def tool(name: str) -> object:
    return {"tool_name": name, "api_name": "get", "template_response": {"price": "int"}}


TASKS = """
from tau_bench.types import Action, Task

TASKS_TRAIN = [
    Task(
        annotator="synthetic",
        user_id="ann_1",
        instruction="You are polite. Return the kettle; Wall Clock; ",
        actions=[Action(name="return_items", kwargs={"order_id": "#W1", "item_ids": ["7"]})],
        outputs=[],
    ),
    Task(user_id="ben_2", instruction="Cancel the order.", actions=[], outputs=[]),
    Task(user_id="ann_1", instruction="You want a new kettle.", actions=[], outputs=[]),
]
"""
PLACES = {
    "hotel": {
        "0": {
            "name": "PARK HOTEL",
            "reviews": {"0": {"traveler_type": "Couples", "sentences": {"0": "Clean rooms.", "1": "Bad food."}}},
            "faqs": {"0": {"question": "Are pets welcome?", "answer": "No."}},
        }
    },
    "restaurant": {"7": {"name": "Roma", "faqs": {"0": {"question": "Is there parking?", "answer": "Yes."}}}},
}
TICKETS = """Summary,Issue id,Status,Priority,Resolution,Created,Resolved,Affects Version/s,Description
Third build fails,3,Open,Major,,02/Feb/21 10:00,,3.0,"It fails.\n\nSee the log."
First build fails,1,Closed,Major,Fixed,30/Jan/21 17:20,,3.0,Late on Friday
Logs of the build,2,Closed,Major,Duplicate,31/Jan/21 09:00,,3.0,
"""
BUGS = """Summary,Issue id,Created,Description
Tabs hang,17,2020-01-02 17:14:21+00:00,"Steps:\n\nOpen a tab.\n \nWait."
Tabs hang again,18,2020-01-03 17:14:21+00:00,"Steps:\n\nOpen two tabs."
Icons,19,2020-01-04 17:14:21+00:00,One part
"""

# These have the form of the real files, by their path in the repository.
FILES = {
    "data/2_passages.jsonl": lines(*[{"passage_id": number, "token_length": 100 + number} for number in range(7)]),
    "data/0_trace.jsonl": lines(
        logged(30, "b", 1, 2, 3), logged(7, "a", 4, 2, 4, 1), logged(8, "a", 1, 2), logged(40, "b", 3, 1, 2)
    ),
    "xquad.en.json": squad(
        [
            {"context": "The sea is deep and salty.", "qas": [asked("How deep is the sea?", "deep")]},
            {"context": "Whales live in the sea.", "qas": [asked("Where do whales live?", "the sea")]},
        ],
        [SKY],
    ),
    "xquad.hi.json": squad(
        [
            {"context": "समुद्र गहरा है।", "qas": [asked("समुद्र कितना है?", "गहरा")]},
            {"context": "आकाश नीला है।", "qas": [asked("आकाश?", "नीला")]},
        ]
    ),
    "squad-style-data/cmrc2018_dev.json": squad(
        [
            {"context": "大海很深。", "qas": [asked("大海多深?", "很深")]},
            {"context": "天空是蓝色的。", "qas": [asked("天空什么颜色?", "蓝色")]},
        ]
    ),
    "data/dev/jaquad_dev_0000.json": squad([{"context": "海は深い。", "qas": [asked("どの海ですか", "海")]}]),
    "data/dev/jaquad_dev_0001.json": squad([{"context": "空は青い。", "qas": [asked("空は何色", "青い")]}]),
    "nq_open/NQ-open.dev.jsonl": lines(
        {"question": "when was the last time anyone was on the moon", "answer": ["December 1972", "1972"]},
        {"question": "who was the first man on the moon", "answer": ["Neil Armstrong"]},
    ),
    "data/ori_pqal.json": json.dumps(
        {"7": {"QUESTION": "Do leaves die?", "CONTEXTS": ["Leaves die in autumn.", "We watched trees."]}}
    ).encode(),
    "dataset_raw/tatqa_dataset_dev.json": json.dumps(
        [
            {
                "table": {"uid": "1", "table": [["", "2019"], ["Sales", "44.1"]]},
                "paragraphs": [{"uid": "2", "order": 1, "text": "Contracts are fixed-price contracts."}],
                "questions": [
                    {"question": "What are the sales in 2019?", "answer_from": "table", "rel_paragraphs": []},
                    {"question": "Which contracts?", "answer_from": "text", "rel_paragraphs": ["1"]},
                ],
            }
        ]
    ).encode(),
    f"{CHROMA}/corpora/chatlogs.md": b"Our themes have sections. " * 200,
    f"{CHROMA}/corpora/finance.md": b"the company had tax credits. ",
    f"{CHROMA}/corpora/pubmed.md": b"Genes of parasites.",
    f"{CHROMA}/corpora/state_of_the_union.md": b"Good evening.",
    f"{CHROMA}/corpora/wikitexts.md": b"= Valkyria =",
    f"{CHROMA}/questions_df.csv": (
        b'question,references,corpus_id\r\n"Sections, or\r\nthemes?","[{""content"": ""themes have""}]",chatlogs\r\n'
    ),
    "banking_data/train.csv": b'text,category\nWhere is my card?,card_arrival\n"Please, why?",reason\n',
    "banking_data/test.csv": b"text,category\nMy card is late,card_arrival\n",
    "grade_school_math/data/train.jsonl": lines({"question": "Ann has 4 apples.", "answer": "#### 4"}),
    "grade_school_math/data/test.jsonl": lines({"question": "Ben has 3 apples.", "answer": "#### 3"}),
    "data/locomo10.zip": zipped(
        {"data/chats/": "", "data/chats/1.json": chat("Ann", "camping"), "data/chats/2.json": chat("Ben", "pottery")}
    ),
    "data/ALL/jsonl/test.jsonl": lines(meeting("budget", 3), meeting("roads", 1)),
    "data/ALL/jsonl/val.jsonl": lines(meeting("schools", 1)),
    "mtragun-human/generation_tasks/reference.jsonl": lines(
        {
            "contexts": [{"document_id": "1", "text": "Chat widgets run on websites."}],
            "input": [message("user", "Do widgets chat?"), message("agent", "Yes."), message("user", "Where?")],
        },
        {
            "contexts": [{"document_id": "2", "text": "Estate agents need a licence."}],
            "input": [message("user", "How to become an estate agent?")],
        },
    ),
    f"{BFCL}/BFCL_v4_multi_turn_base.json": lines(
        {
            "question": [
                [{"role": "user", "content": "Copy the file."}],
                [{"role": "user", "content": "Post a tweet about the file."}],
            ]
        }
    ),
    **{
        f"{BFCL}/multi_turn_func_doc/{name}.json": lines({"name": name, "description": f"Handles a {name}."})
        for name in (
            "gorilla_file_system",
            "math_api",
            "message_api",
            "posting_api",
            "ticket_api",
            "trading_bot",
            "travel_booking",
            "vehicle_control",
        )
    },
    "data/api/huggingface_api.jsonl": lines({"domain": "Summarization", "api_name": "t5"}),
    "gorilla/eval/eval-data/questions/huggingface/questions_huggingface_0_shot.jsonl": lines(
        {"question_id": 1, "text": " Find a model for summarization.\\n", "category": "generic"}
    ),
    "data/search/code_idx_map.txt": json.dumps({"def paste(clipboard):": 0, "def write_boolean(n):": 1}).encode(),
    "data/search/cosqa-retrieval-dev-500.json": json.dumps(
        [{"doc": "python write boolean", "retrieval_idx": 1}]
    ).encode(),
    "data/search/cosqa-retrieval-test-500.json": json.dumps(
        [{"doc": "clipboard contents", "retrieval_idx": 0}]
    ).encode(),
    f"{BFCL}/BFCL_v4_live_multiple.json": lines(
        {"question": [[{"role": "user", "content": "Weather?"}]], "function": [{"name": "get"}, {"name": "put"}]},
        {"question": [[{"role": "user", "content": "Write."}]], "function": [{"name": "put"}, {"name": "get"}]},
    ),
    "test/dialogues_001.json": dialogues(["Park Hotel", "Sea Hotel"], ["Sea Hotel", "City Hotel"]),
    "test/dialogues_003.json": dialogues(["Park Hotel"]),
    "test/dialogues_020.json": dialogues(["City Hotel", "Park Hotel"]),
    **{
        path: post(1 + i % 28, f"Post {i}", f"## Modules {i}\n", "Modules came.")
        for i, path in enumerate(listed("go_blog_news"))
    },
    **{
        path: f"# {path}\nclass Map:\n    def bind(self): ...\n\ndef redirect(): ...\n".encode()
        for path in listed("werkzeug_code")
    },
    **{path: page(path) for path in listed("flask_releases")},
    "tests/test_routing.py": b"import pytest\n\ndef test_bind():\n    Map().bind()\n\ndef helper(): ...\n",
    "hadoop/hadoop_bugs.csv": TICKETS.encode(),
    "seamonkey/SeaMonkey_bugs.csv": BUGS.encode(),
    "SciTLDR-Data/SciTLDR-A/test.jsonl": lines({"title": "Learning", "source": ["Nets learn.", "Slowly."]}),
    "SciTLDR-Data/SciTLDR-A/dev.jsonl": lines({"title": "Sleep", "source": ["Nets sleep.", "Rarely."]}),
    "tau_bench/envs/retail/tasks_train.py": TASKS.encode(),
    "data/dev.json": squad([SKY]),
    "data/test.json": squad([{"context": "We share emails.", "qas": [asked("Do they share emails?", "We")]}]),
    "data/question-answering/200423_covidQA.json": squad([SKY]),
    "DRCD_dev.json": squad([{"context": "大海很深。", "qas": [asked("大海多深?", "很深")]}]),
    "data/knowledge.json": json.dumps(PLACES).encode(),
    "data/val/logs.json": json.dumps(
        [
            [message("U", "A clean hotel?"), message("S", "Yes."), message("U", "And the food?")],
            [message("U", "A clean hotel?")],
            [message("U", "Is there parking?")],
        ]
    ).encode(),
    **{
        f"solvable_queries/test_instruction/{name}.json": json.dumps(
            [
                {
                    "query": f"Use tool {name}",
                    "api_list": [tool(name), tool("weather")],
                    "relevant APIs": [[name, "get"]],
                }
            ]
        ).encode()
        for name in ("G1_category", "G1_instruction", "G1_tool", "G2_category", "G2_instruction", "G3_instruction")
    },
}


class Host:
    """A server that finds files by their path in a repository, and records requests."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.asked: list[str] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.asked.append(self.path)
                data = host.files.get(inside(self.path[1:]))
                self.send_response(200 if data is not None else 404)
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class has this name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def host() -> Iterator[Host]:
    served = Host()
    thread = Thread(target=served.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()


def small(name: str) -> Source:
    """Return a source whose files are the small ones, with their sums."""
    source = SOURCES[name]
    sums = [hashlib.sha256(FILES[inside(file.path)]).hexdigest() for file in source.files]
    return source._replace(
        files=tuple(File(file.path, sum) for file, sum in zip(source.files, sums, strict=True))  # noqa: A001
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_trace_names_its_source_and_licence(host: Host, tmp_path: Path, name: str) -> None:
    path = make(small(name), tmp_path / "traces", host.url)
    trace = read_trace(path)
    assert (trace.name, trace.header["licence"], trace.header["source"]) == (
        name,
        SOURCES[name].licence,
        SOURCES[name].origin,
    )
    assert set(trace.tokens) == {block for request in trace.requests for block in request.blocks}
    first: dict[str, str] = {}
    for file in small(name).files:
        first.setdefault(file.sha256, f"/{file.path}")
    assert host.asked == [*first.values()], "equal files are fetched once"
    before = path.read_bytes()
    path.unlink()
    assert make(small(name), tmp_path / "traces", "http://127.0.0.1:9").read_bytes() == before, "from what was kept"


def test_the_services_requests_come_in_order_of_arrival(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("ragpulse_rag"), tmp_path, host.url))
    assert [request.blocks for request in trace.requests] == [(4, 2, 1), (1, 2, 3), (3, 1, 2)]
    assert [request.conversation for request in trace.requests] == [0, 1, 1]
    assert trace.tokens == {number: 100 + number for number in (1, 2, 3, 4)}
    assert trace.k == 7


def test_questions_find_their_texts(host: Host, tmp_path: Path) -> None:
    found = read_trace(make(small("xquad_en"), tmp_path, host.url))
    assert [request.blocks for request in found.requests] == [(0, 1), (1,), ()]
    records = read_trace(make(small("nq_open_records"), tmp_path, host.url))
    assert [request.blocks[0] for request in records.requests] == [0, 1]


@pytest.mark.parametrize("name", ["xquad_hi", "cmrc_zh"])
def test_questions_find_their_texts_in_other_scripts(host: Host, tmp_path: Path, name: str) -> None:
    trace = read_trace(make(small(name), tmp_path, host.url))
    assert [request.blocks[0] for request in trace.requests] == [0, 1]


def test_a_question_searches_its_own_collection_only(host: Host, tmp_path: Path) -> None:
    facts = read_trace(make(small("locomo_facts"), tmp_path, host.url))
    assert [request.blocks for request in facts.requests] == [(0,), (1,), (0,), (1,)], "the chats take turns"
    turns = read_trace(make(small("locomo_turns"), tmp_path, host.url))
    assert [set(request.blocks) for request in turns.requests] == [{0, 1}, {2, 3}, {0, 1}, {2, 3}]


def test_published_contexts_keep_their_order(host: Host, tmp_path: Path) -> None:
    tools = read_trace(make(small("bfcl_lists"), tmp_path, host.url))
    assert [request.blocks for request in tools.requests] == [(0, 1), (1, 0)]
    abstracts = read_trace(make(small("pubmedqa_abstracts"), tmp_path, host.url))
    assert [request.blocks for request in abstracts.requests] == [(0, 1)]
    records = read_trace(make(small("sgd_results"), tmp_path, host.url))
    assert [(request.conversation, request.turn, request.blocks) for request in records.requests] == [
        (0, 1, (0, 1)),
        (2, 1, (2, 0)),
        (0, 2, (1, 2)),
    ], "one record is no context"


def test_a_turn_also_searches_with_the_turn_before_it(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("mtragun_turns"), tmp_path, host.url))
    found = [(request.conversation, request.turn, request.blocks) for request in trace.requests]
    assert found == [(0, 1, (0,)), (1, 1, (1,)), (0, 2, (0,))]
    assert [request.query_tokens for request in trace.requests] == [4, 8, 2]


def test_a_chat_that_continues_another_one_counts_once(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("dstc11_turns"), tmp_path, host.url))
    assert [(request.conversation, request.blocks[0]) for request in trace.requests] == [(0, 0), (1, 2), (0, 0)]


def test_a_question_finds_what_came_before_it_only(host: Host, tmp_path: Path) -> None:
    tickets = read_trace(make(small("hadoop_tickets"), tmp_path, host.url))
    assert [request.blocks for request in tickets.requests] == [(0,), (0, 1)], "the first one finds nothing"
    memories = read_trace(make(small("taubench_memories"), tmp_path, host.url))
    assert [request.conversation for request in memories.requests] == [1, 0]
    assert memories.requests[0].blocks == (3,), "an order, in Ann's tool call"
    assert set(memories.requests[1].blocks) == {0, 1, 2, 3}, "Ann's notes, and not those of this task"
    arrivals = [*"xyz", Question("y", "y"), "y", Question("x", "x"), "x", Question("x", "x")]
    found = searched_over_time(arrivals, 5, latest=2)
    assert [line["blocks"] for line in found if "request" in line] == [[1], [0]]


def test_posts_come_by_date_with_their_questions(host: Host, tmp_path: Path) -> None:
    files = [post(2, "Later", "Go has modules. More."), post(1, "Sooner", "## Go tools\n", "Text")]
    title_and_text = ["Sooner\n## Go tools\nText", "Go tools\nText", "Later\nGo has modules. More.", "Go has modules."]
    assert [each if isinstance(each, str) else each.text for each in posts(files)] == title_and_text


def test_documents_that_are_read_once_share_nothing(host: Host, tmp_path: Path) -> None:
    for name, blocks in (("seamonkey_tickets", [(0, 1, 2), (3, 4)]), ("scitldr_abstracts", [(0, 1), (2, 3)])):
        trace = read_trace(make(small(name), tmp_path, host.url))
        assert [request.blocks for request in trace.requests] == blocks


def test_a_title_searches_its_own_abstract(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("scitldr_sentences"), tmp_path, host.url))
    assert [request.blocks for request in trace.requests] == [(), (2,)], "one abstract has no word of its title"


def test_a_test_searches_for_the_code_that_it_runs(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("werkzeug_code"), tmp_path, host.url))
    assert [request.blocks[0] for request in trace.requests] == [1], (
        "a method stands behind the functions of its module"
    )
    assert [name for name, _ in defined("class A:\n    async def b(self): ...\n\ndef c(): ...\n")] == ["c", "b"]


def test_blocks_are_filled_with_whole_parts() -> None:
    assert list(filled(["äb ", "c ", "defghij ", "k"], 6)) == ["äb c ", "defghij ", "k"]


def test_a_search_writes_scores_more_candidates_and_gold(host: Host, tmp_path: Path) -> None:
    collection = Collection(
        [f"The sea {'is deep ' * (i + 1)}" for i in range(20)], [Question("Deep?", "deep", gold=["x"])]
    )
    blocks = [collection.texts[line["block"]] for line in searched([collection], 3) if "block" in line]
    (line,) = [line for line in searched([collection], 3) if "request" in line]
    assert (line["k"], len(line["blocks"]), len(line["scores"]), line["gold"]) == (3, 15, 15, [])
    assert line["scores"] == sorted(line["scores"], reverse=True)
    assert len(blocks) == 20
    for name, gold in (
        ("tatqa_reports", [(0,), (1,)]),
        ("cosqa_functions", [(1,), (0,)]),
        ("xquad_en", [(0,), (1,), (2,)]),
    ):
        trace = read_trace(make(small(name), tmp_path, host.url))
        assert [request.gold for request in trace.requests] == gold
        assert {request.k for request in trace.requests} == {SOURCES[name].k}
        assert all(len(request.scores) == len(request.blocks) for request in trace.requests)
    facts = read_trace(make(small("locomo_facts"), tmp_path, host.url))
    assert [request.gold for request in facts.requests] == [(0,), (1,), (), ()]
    tools = read_trace(make(small("stabletoolbench_search"), tmp_path, host.url))
    assert all(request.gold[0] == request.blocks[0] for request in tools.requests)
    (themes,) = read_trace(make(small("chroma_800"), tmp_path, host.url)).requests
    assert themes.gold == (0,)


def test_a_dense_search_finds_texts_by_cosine(host: Host, tmp_path: Path) -> None:
    texts = ["The cat sleeps.", "A dog barks at a cat.", "Stars shine at night.", "Planets and stars move."]
    search = latent_search(texts, dimensions=2)
    assert {place for place, _ in search("planets", 2)} == {2, 3}, "stars and planets are one subject"
    scores = [score for _, score in search("planets", 4)]
    assert 1 >= scores[0] >= scores[1] > 0.5
    assert scores[2:] == [0, 0]
    trace = read_trace(make(small("cosqa_functions_dense"), tmp_path, host.url))
    assert [request.blocks[0] for request in trace.requests] == [1, 0]


def test_releases_have_their_name_in_front_of_each_section(host: Host, tmp_path: Path) -> None:
    trace = read_trace(make(small("flask_releases"), tmp_path, host.url))
    texts = [trace.block(block).text for block in trace.requests[0].blocks]
    first = {text.split("\n")[0].partition(", ")[0] for text in texts}
    assert first <= {f"Flask {release}" for release in ("2.1.3", "2.2.5", "2.3.3", "3.0.3", "3.1.2")}
    assert len({text.split("\n", 1)[1] for text in texts}) < len(texts), "the same section of several releases"
    assert [*sections_of("Title\n=====\n\nText.\n\nMore\n----\n\n")] == [("Title", "Text.")]


def test_a_long_set_of_questions_is_cut() -> None:
    collection = Collection(["The sea is deep."], [Question("How deep?", "deep")] * 3)
    assert [line["request"] for line in searched([collection], 1, most=2) if "request" in line] == [0, 1]


def test_texts_are_written_for_the_benchmarks_that_read_them(host: Host, tmp_path: Path) -> None:
    make(small("xquad_en"), tmp_path, host.url)
    with gzip.open(tmp_path / plugin_hit_ratio.BUNDLE, "rt", encoding="utf-8") as file:
        about, *records = map(json.loads, file)
    assert about["licence"] == "CC BY-SA 4.0"
    assert [record["text"] for record in records if "block" in record][1] == "Whales live in the sea."
    assert [record for record in records if "query" in record][1] == {
        "query": 1,
        "text": "Where do whales live?",
        "answers": ["the sea"],
        "gold": [1],
    }
    assert [path.name for path in files([tmp_path])] == ["xquad_en.jsonl.gz"], "a bundle of texts is no trace"


def test_another_file_than_expected_is_refused(host: Host, tmp_path: Path) -> None:
    host.files["xquad.en.json"] += b" "
    with pytest.raises(FetchError, match=r"xquad.en.json has the SHA-256 sum [0-9a-f]{64}, not [0-9a-f]{64}"):
        make(small("xquad_en"), tmp_path, host.url)
    assert not list(tmp_path.rglob("*.json*"))


@pytest.mark.parametrize("url", [lambda host: host.url, lambda host: "http://127.0.0.1:9"])
def test_a_missing_file_or_server_is_reported(host: Host, tmp_path: Path, url: Callable[[Host], str]) -> None:
    host.files.clear()
    with pytest.raises(FetchError, match="could not be fetched"):
        make(small("nq_open_records"), tmp_path, url(host))


def test_the_sums_and_commits_are_whole() -> None:
    for source in SOURCES.values():
        for file in source.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            assert len(bytes.fromhex(file.path.split("/")[2])) == 20


def test_the_list_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_traces.py", "--list", "--folder", str(tmp_path / "traces")])
    fetch_traces.main()
    printed = capsys.readouterr().out
    assert all(source.licence in printed and name in printed for name, source in SOURCES.items())
    assert not list(tmp_path.iterdir())
