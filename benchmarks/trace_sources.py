"""Public data sets, with the commit, checksums and licence of each, and the way to make a trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trace_texts
from trace_lines import (
    MAX_REQUESTS,
    Words,
    character_pairs,
    latent_search,
    own_part_lines,
    own_section_lines,
    ragpulse_lines,
    searched,
    searched_over_time,
    service_result_lines,
    spaced_words,
    tool_list_lines,
)
from trace_texts import Collection, Data, Line


class File(NamedTuple):
    """One file of a source."""

    path: str
    """The path after the host, with the commit."""
    sha256: str


class Source(NamedTuple):
    """A public data set, and the way to make a trace of it."""

    name: str
    origin: str
    licence: str
    retriever: str
    k: int
    files: tuple[File, ...]
    lines: Callable[[Data], Iterator[Line]]
    """The blocks, then the requests."""
    bundle: str = ""
    """The name of a file of its texts; empty without one."""
    texts: Callable[[Data], Iterator[Line]] = lambda _: iter(())
    """The lines of that file."""


_BM25 = "BM25 of warmprefix's demo"
_DENSE_K = 8
_LATENT = "latent semantic analysis of the texts, 200 dimensions: cosines"
_GORILLA = "ShishirPatil/gorilla/6ea57973c7a6097fd7c5915698c54c17c5b1b6c8"
_CHROMA = (
    "brandonstarxel/chunking_evaluation/d451fc4cf56e417b755994b4ca5212fd5057c0d2/"
    "chunking_evaluation/evaluation_framework/general_evaluation_data"
)


def _searched(
    name: str,
    origin: str,
    licence: str,
    k: int,
    files: tuple[File, ...],
    read: Callable[[Data], Sequence[Collection]],
    words: Words | None = None,
    most: int = MAX_REQUESTS,
) -> Source:
    return Source(name, origin, licence, _BM25, k, files, lambda data: searched(read(data), k, words, most))


def _files(folder: str, sums: Mapping[str, str]) -> tuple[File, ...]:
    """Return files of one folder (`owner/name/commit/folder`), by name."""
    return tuple(File(f"{folder}/{name}", sha256) for name, sha256 in sums.items())


def _listed_files(name: str) -> tuple[File, ...]:
    """Return the files that `sums/NAME.sha256` lists, below a line `# owner/name/commit`."""
    return tuple(file for _, file in _listed_releases(name))


def _listed_releases(name: str) -> Iterator[tuple[str, File]]:
    """Yield the same files, each with the name of its release: `# owner/name/commit RELEASE` stands above its files."""
    folder = release = ""
    for line in (Path(__file__).parent / "sums" / f"{name}.sha256").read_text(encoding="utf-8").splitlines():
        first, rest = line.split(maxsplit=1)
        if first == "#":
            folder, _, release = rest.partition(" ")
        else:
            yield release, File(f"{folder}/{rest}", first)


def _dense(name: str, source: Source, read: Callable[[Data], Sequence[Collection]]) -> Source:
    """Return the trace that a dense retriever makes of the same texts and questions."""
    lines = partial(_dense_lines, read)
    return source._replace(name=name, retriever=_LATENT, k=_DENSE_K, lines=lines, bundle="")


def _dense_lines(read: Callable[[Data], Sequence[Collection]], data: Data) -> Iterator[Line]:
    return searched(read(data), _DENSE_K, index=latent_search)


_TOOL_TURNS = _files(
    f"{_GORILLA}/berkeley-function-call-leaderboard/bfcl_eval/data",
    {"BFCL_v4_multi_turn_base.json": "1a21a995d06fd6f20ba55de7bced30ef953ec35e998f502ec2ecf4d66ef1c43a"},
) + _files(
    f"{_GORILLA}/berkeley-function-call-leaderboard/bfcl_eval/data/multi_turn_func_doc",
    {
        "gorilla_file_system.json": "c4c1b741c71e2a17c97a5dc9c4a91d89978c4eaece56494d14272d5df6c650e9",
        "math_api.json": "83fa31708c89442bdcf12ac4dfbe3be8663ec9183a1b1524a9fda98164bc7e0b",
        "message_api.json": "4d58ea933a5d2b280d7a52366617fb47fecd333d7b0e08e724db6fa12fb5f847",
        "posting_api.json": "87f9fc404a06e4107d7c366f1399c596440e84c16cb119faf374b2f532d86e8b",
        "ticket_api.json": "31324e0380782664fe82ba05bd23517808ad55692b45a5fe7c3d4d395fe4f0f8",
        "trading_bot.json": "1a7933fd8f0cb8fbec38aeae05cb8c24132747cad4904fe1c13ac3d01fc22c2d",
        "travel_booking.json": "f17b950c13adddf41d0848077df58788252e4c2e7cad5cfa71c8c4bf04f57b26",
        "vehicle_control.json": "0c8a66292844874ef7b168f343bc394d8615d2d9e1f4387999a9ee23011eac78",
    },
)
_API_REFERENCES = _files(
    f"{_GORILLA}/data/api",
    {"huggingface_api.jsonl": "6757c59091abcf6d0f32f878a765b4ae28a9db7f88c7a1a4ee8bfeda72472f6d"},
) + _files(
    f"{_GORILLA}/gorilla/eval/eval-data/questions/huggingface",
    {"questions_huggingface_0_shot.jsonl": "2e27943a14207c312b33ac171d83794633ee3196cefde68cd35c789d75e62477"},
)
_CORPORA = _files(
    f"{_CHROMA}/corpora",
    {
        "chatlogs.md": "543a98f82b2a6a492349fd7f8c9d6c3e78d1a4af81d13c79a7fd513c3f65bda6",
        "finance.md": "1c48d0156820abc88e46e5c992fa0cd2708b07ae59a3771b2b18234b7208561f",
        "pubmed.md": "0fd9242ffb253695e5d0f0215cb79a66a2a8f1236591e764c60d370747684ced",
        "state_of_the_union.md": "6fc21d560d31eb2421e337596feea0f83f1fa9ca02c6c4e47bc26959d7531b37",
        "wikitexts.md": "74cafcdb771185ecb9f22cc41b73e2e44477e0636ecf9cf1f96fd6ee0f4b86c0",
    },
) + _files(
    _CHROMA,
    {"questions_df.csv": "3ab3901889b8900f43775537bf12d36bd6614255fc59124faca31bede1dda7a3"},
)
_CHATS = _files(
    "snap-research/locomo/e76cdff4a04fce19090596d49862fe87a5c15aaa/data",
    {"locomo10.zip": "5c342973da4b45c12583c9fc7594d6410880f5aba2c491a0db09db262c906fb5"},
)
_BUGS = "av9ash/gitbugs/eadf2d6794990a1aaa26d0ae15391f29f8969301"
_BUGS_ORIGIN = "github.com/av9ash/gitbugs at eadf2d6"
_ABSTRACTS = _files(
    "pubmedqa/pubmedqa/1cbae8e92f72f20c8d3747cbb3bf5bc53554d997/data",
    {"ori_pqal.json": "8b3276be8942ebbd77f3ddcda12c1749bf0e490045a736fd8438ee40cf37a41d"},
)

_SCIENCE = _files(
    "allenai/scitldr/5ccad9c00a60ad75c9e04abf7f27d0f53f983b20/SciTLDR-Data/SciTLDR-A",
    {
        "test.jsonl": "fb42dd6cd4f4a1928ae8a01a189456fbfe994a07e938bd49f68653933f6503c9",
        "dev.jsonl": "3191fa98ccc09521332b7a1cd63b1930be4e8df125a235ccd31e40329709525e",
    },
)
_FLASK_RELEASES = [f"Flask {release}" for release, _ in _listed_releases("flask")]

_PUBLISHED: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source(
            "ragpulse_rag",
            "github.com/flashserve/RAGPulse at 3672232 (arXiv:2511.12979)",
            "MIT",
            "that of the service",
            7,
            _files(
                "flashserve/RAGPulse/3672232d45d749fdcf45dbc38cc77e5264af4a32/data",
                {
                    "2_passages.jsonl": "8575941cab2eb1cae25e589b7fab3ccb6affc3809e4156b1dc6db40d9e65b891",
                    "0_trace.jsonl": "cd371571bef3320907147f8901729e37f412aafb067ec8eb153e2828e1801e65",
                },
            ),
            ragpulse_lines,
        ),
        _searched(
            "xquad_en",
            "github.com/google-deepmind/xquad at 7d30520, xquad.en.json (of SQuAD 1.1)",
            "CC BY-SA 4.0",
            20,
            _files(
                "google-deepmind/xquad/7d30520c717524000f0d9d2f9c10a069acd9d285",
                {"xquad.en.json": "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29"},
            ),
            trace_texts.squad,
        )._replace(bundle="xquad_squad", texts=trace_texts.squad_texts),
        _searched(
            "xquad_hi",
            "github.com/google-deepmind/xquad at 7d30520, xquad.hi.json (Hindi)",
            "CC BY-SA 4.0",
            10,
            _files(
                "google-deepmind/xquad/7d30520c717524000f0d9d2f9c10a069acd9d285",
                {"xquad.hi.json": "df2cce3532b37e9beb8979704b5c9a4bf874358f105395a298b89427b43b9d24"},
            ),
            trace_texts.squad,
            spaced_words,
        ),
        _searched(
            "cmrc_zh",
            "github.com/ymcui/cmrc2018 at c0eb1b6, squad-style-data/cmrc2018_dev.json (Chinese)",
            "CC BY-SA 4.0",
            10,
            _files(
                "ymcui/cmrc2018/c0eb1b6ba219847457e6af3180da722bbeb656af/squad-style-data",
                {"cmrc2018_dev.json": "e9ff74231f05c230c6fa88b84441ee334d97234cbb610991cd94b82db00c7f1f"},
            ),
            trace_texts.squad,
            character_pairs,
        ),
        _searched(
            "jaquad_ja",
            "github.com/SkelterLabsInc/JaQuAD at 23f5d72, data/dev, two files of four (Japanese)",
            "CC BY-SA 3.0",
            10,
            _files(
                "SkelterLabsInc/JaQuAD/23f5d72cc273c49b35e2d9efe0f51757aa1770bd/data/dev",
                {
                    "jaquad_dev_0000.json": "8712bc34623c6fec856f170ff0b8566421c3c261752b1797b94938f48c1f7bc4",
                    "jaquad_dev_0001.json": "6d777275f61b0250eb2d8f595bf6c602afecb7b7406e7c0c9c3b9d763027068d",
                },
            ),
            trace_texts.squad,
            character_pairs,
        ),
        _searched(
            "nq_open_records",
            "github.com/google-research-datasets/natural-questions at fb26a30, nq_open/NQ-open.dev.jsonl",
            "CC BY-SA 3.0",
            20,
            _files(
                "google-research-datasets/natural-questions/fb26a3073b1fe636c97302890a27b491d6530130/nq_open",
                {"NQ-open.dev.jsonl": "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616"},
            ),
            trace_texts.nq_open,
            most=4_000,
        ),
        _searched(
            "pubmedqa_sections",
            "github.com/pubmedqa/pubmedqa at 1cbae8e, data/ori_pqal.json",
            "MIT; the abstracts are those of PubMed",
            5,
            _ABSTRACTS,
            trace_texts.pubmed,
        ),
        Source(
            "pubmedqa_abstracts",
            "github.com/pubmedqa/pubmedqa at 1cbae8e, data/ori_pqal.json",
            "MIT; the abstracts are those of PubMed",
            "as published",
            10,
            _ABSTRACTS,
            own_section_lines,
        ),
        _searched(
            "tatqa_reports",
            "github.com/NExTplusplus/TAT-QA at 870accc, dataset_raw/tatqa_dataset_dev.json",
            "CC BY 4.0",
            10,
            _files(
                "NExTplusplus/TAT-QA/870accc41953dcde885aabeb963d94aabdc0fbc3/dataset_raw",
                {"tatqa_dataset_dev.json": "8da095a819af6db3c14877c6df2d4d29960e41d1a63dd1fa853507bd2a616af5"},
            ),
            trace_texts.financial_reports,
        ),
        _searched(
            "chroma_800",
            "github.com/brandonstarxel/chunking_evaluation at d451fc4, general_evaluation_data",
            "MIT; the corpora are public texts under licences of their own",
            5,
            _CORPORA,
            trace_texts.fixed_sizes,
        ),
        _searched(
            "banking77_examples",
            "github.com/PolyAI-LDN/task-specific-datasets at 57ec275, banking_data",
            "CC BY 4.0",
            20,
            _files(
                "PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b/banking_data",
                {
                    "train.csv": "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b",
                    "test.csv": "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d",
                },
            ),
            trace_texts.labelled_utterances,
        ),
        _searched(
            "gsm8k_examples",
            "github.com/openai/grade-school-math at 3101c7d, grade_school_math/data",
            "MIT",
            8,
            _files(
                "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data",
                {
                    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
                    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
                },
            ),
            trace_texts.worked_problems,
        ),
        _searched(
            "locomo_turns",
            "github.com/snap-research/locomo at e76cdff, data/locomo10.zip",
            "CC BY-NC 4.0: for non-commercial use only",
            20,
            _CHATS,
            trace_texts.chat_turns,
        ),
        _searched(
            "locomo_facts",
            "github.com/snap-research/locomo at e76cdff, data/locomo10.zip",
            "CC BY-NC 4.0: for non-commercial use only",
            15,
            _CHATS,
            trace_texts.chat_facts,
        ),
        _searched(
            "qmsum_meetings",
            "github.com/Yale-LILY/QMSum at 83d7768, data/ALL/jsonl, test and val",
            "MIT",
            5,
            _files(
                "Yale-LILY/QMSum/83d7768c1f2b4dfeb091385d3dc7e239b8e5bb7e/data/ALL/jsonl",
                {
                    "test.jsonl": "6bcd428211260ad2efae3af76cbaf6a7f5ae4bb5e1e59c45a4b8e89539cb9208",
                    "val.jsonl": "fc7444e241bdbe6997c01720d07f1a58b7357284acb73f909766e5a4700db49f",
                },
            ),
            trace_texts.meetings,
        ),
        _searched(
            "mtragun_turns",
            "github.com/IBM/mt-rag-benchmark at cc5b1d4, mtragun-human/generation_tasks/reference.jsonl",
            "Apache-2.0",
            8,
            _files(
                "IBM/mt-rag-benchmark/cc5b1d481b391181b89f7ced860308482e785463/mtragun-human/generation_tasks",
                {"reference.jsonl": "68053f709c928570718fd2c88455eccf974746f5bfa2206d7fd39b969acb21d4"},
            ),
            trace_texts.support_chats,
        ),
        _searched(
            "bfcl_turns",
            "github.com/ShishirPatil/gorilla at 6ea5797, BFCL_v4_multi_turn_base.json and its tools",
            "Apache-2.0",
            8,
            _TOOL_TURNS,
            trace_texts.tool_turns,
        ),
        _searched(
            "apibench_references",
            "github.com/ShishirPatil/gorilla at 6ea5797, data/api/huggingface_api.jsonl and its questions",
            "Apache-2.0",
            5,
            _API_REFERENCES,
            trace_texts.api_references,
        ),
        _searched(
            "cosqa_functions",
            "github.com/Jun-jie-Huang/CoCLR at 14ebcac, data/search",
            "Computational Use of Data Agreement 1.0 (data), MIT (code)",
            10,
            _files(
                "Jun-jie-Huang/CoCLR/14ebcacf9e9bc3e7109102632bc63047876f27d2/data/search",
                {
                    "code_idx_map.txt": "be8a910ca03cb9f1b38a0eba6dc8109eeb8040a40aaba1a467a7b8426d261f3f",
                    "cosqa-retrieval-dev-500.json": "ccdfffee7ae1f1cf1a0406566a61c984f4fbce678c8ea108eedd03d11bff9518",
                    "cosqa-retrieval-test-500.json": "27d3552b2e7dd86cf9f9a0b3c135e6777d4faafa9c29fb1b9b01ece945974ad6",
                },
            ),
            trace_texts.functions,
        ),
        Source(
            "bfcl_lists",
            "github.com/ShishirPatil/gorilla at 6ea5797, BFCL_v4_live_multiple.json",
            "Apache-2.0",
            "as published",
            10,
            _files(
                f"{_GORILLA}/berkeley-function-call-leaderboard/bfcl_eval/data",
                {"BFCL_v4_live_multiple.json": "fd8ccfad4d911420d0e3341dbe2fff77d1d341da934248b9bb2bda24ab3a10c8"},
            ),
            tool_list_lines,
        ),
        Source(
            "sgd_results",
            "github.com/google-research-datasets/dstc8-schema-guided-dialogue at e852981, 3 files of test",
            "CC BY-SA 4.0",
            "that of the services",
            10,
            _files(
                "google-research-datasets/dstc8-schema-guided-dialogue/e852981ae34990f4358979625854259302feaa78/test",
                {
                    "dialogues_001.json": "1fa13b0fe607100bc66ed15e0490df9c52a2cec087ca9733e0f506755eef0ada",
                    "dialogues_003.json": "b595a04f7848aed76d11e82250089023e42a6e5ce047c78b8ddd0f4856dcbecb",
                    "dialogues_020.json": "9619574d5043827ea2e397702b88033dc013e4ac870f410a8016c8b223f55ec4",
                },
            ),
            service_result_lines,
        ),
        Source(
            "go_blog_news",
            "github.com/golang/website at b02076a, _content/blog, posts since 2018 (sums/go_blog.sha256)",
            "CC BY 4.0",
            f"{_BM25}, among the latest 500 blocks",
            10,
            _listed_files("go_blog"),
            lambda data: searched_over_time(trace_texts.posts(data), 10, latest=500),
        ),
        Source(
            "hadoop_tickets",
            f"{_BUGS_ORIGIN}, hadoop/hadoop_bugs.csv",
            "CC BY 4.0",
            f"{_BM25}, among earlier tickets",
            10,
            _files(
                f"{_BUGS}/hadoop",
                {"hadoop_bugs.csv": "a04ac6238c39afaf97b9ffb2a416c1318dd85672a31e9a6dd74f64e199b77358"},
            ),
            lambda data: searched_over_time(trace_texts.tickets(data), 10),
        ),
        Source(
            "seamonkey_tickets",
            f"{_BUGS_ORIGIN}, seamonkey/SeaMonkey_bugs.csv",
            "CC BY 4.0",
            "none: each ticket is read once",
            15,
            _files(
                f"{_BUGS}/seamonkey",
                {"SeaMonkey_bugs.csv": "6e8cc0424fb5b7773dab5a843df34b832afcfc94fd4e9cc5e7df82cc1456dad7"},
            ),
            lambda data: own_part_lines(trace_texts.ticket_paragraphs(data)),
        ),
        Source(
            "scitldr_abstracts",
            "github.com/allenai/scitldr at 5ccad9c, SciTLDR-A, test and dev",
            "Apache-2.0",
            "none: each abstract is read once",
            15,
            _SCIENCE,
            lambda data: own_part_lines(trace_texts.abstract_sentences(data)),
        ),
        _searched(
            "scitldr_sentences",
            "github.com/allenai/scitldr at 5ccad9c, SciTLDR-A, test and dev",
            "Apache-2.0",
            5,
            _SCIENCE,
            trace_texts.own_sentences,
        ),
        Source(
            "taubench_memories",
            "github.com/sierra-research/tau-bench at 59a200c, tau_bench/envs/retail/tasks_train.py",
            "MIT",
            f"{_BM25}, among earlier notes",
            20,
            _files(
                "sierra-research/tau-bench/59a200c6d575d595120f1cb70fea53cef0632f6b/tau_bench/envs/retail",
                {"tasks_train.py": "30880ce4e8d524dd0fdd18c1d3a5713551fc8638e82673de3e0fd1ab70046c6f"},
            ),
            lambda data: searched_over_time(trace_texts.memories(data), 20),
        ),
        _searched(
            "policies_k3",
            "github.com/wasiahmad/PolicyQA at 775538b, data, dev and test",
            "MIT",
            3,
            _files(
                "wasiahmad/PolicyQA/775538bc6d932e9d0dd16975d4373659cf8964fe/data",
                {
                    "dev.json": "5ced8cbe6617c132999a57b3ab910fc242501357fc99cbc5a1802f0a1b9ce4bf",
                    "test.json": "92929068b7dffa1843f81d661f23da86a64f4a35ffae59fa8d78878277ab9a7f",
                },
            ),
            trace_texts.policies,
        ),
        _searched(
            "covid_papers_k50",
            "github.com/deepset-ai/COVID-QA at fb2eb5e, data/question-answering/200423_covidQA.json",
            "Apache-2.0; the papers are open access, under licences of their own",
            50,
            _files(
                "deepset-ai/COVID-QA/fb2eb5e249618457e5359806601086c635c8eb8f/data/question-answering",
                {"200423_covidQA.json": "ab310b4e39f726e087c8fa3d1787c73771dacddc584977204ebe3cc889ee1264"},
            ),
            trace_texts.papers,
        ),
        _searched(
            "drcd_bursts",
            "github.com/DRCKnowledgeTeam/DRCD at b944790, DRCD_dev.json (Chinese)",
            "CC BY-SA 3.0",
            10,
            _files(
                "DRCKnowledgeTeam/DRCD/b944790de5af02c5fbb7cd9cb1473d27d169eebf",
                {"DRCD_dev.json": "e236df03861ba241bd7b29628cd48b3b8e339c60137e041a4358b5320ed61928"},
            ),
            trace_texts.squad,
        ),
        _searched(
            "dstc11_turns",
            "github.com/alexa/dstc11-track5 at 1419e96, data/knowledge.json and data/val/logs.json",
            "CDLA-Sharing-1.0",
            10,
            _files(
                "alexa/dstc11-track5/1419e96d613870703399309c46c7e33cba558199/data",
                {
                    "knowledge.json": "a7e024a7d249b75f79fe85aed073cd79648b965ff30166fec420288703f38b99",
                    "val/logs.json": "69aea58e787171e4681c0d80359967806fd63a04ffd8b0b20eb13bfb1df77bdc",
                },
            ),
            trace_texts.hotel_chats,
        ),
        _searched(
            "stabletoolbench_search",
            "github.com/THUNLP-MT/StableToolBench at aa4ed9f, solvable_queries/test_instruction",
            "Apache-2.0",
            10,
            _files(
                "THUNLP-MT/StableToolBench/aa4ed9f4737ad98bd706663f01d63623c3427812/solvable_queries/test_instruction",
                {
                    "G1_category.json": "123cb9073c8b6e6473df91c8a51170277087e1c263eba2eb6077170edbe849c3",
                    "G1_instruction.json": "500aa0105ed451538448f6ea04f10661536b013f3e1a293840fe401688160e7c",
                    "G1_tool.json": "05d0c180bbec9d060fd267cc79399bda05beddd0a6d0de68b5488926a9029a1a",
                    "G2_category.json": "71e18112f7940934f159d623b1c2b4740b1b4dc58a0b596c63b8151abbf8267e",
                    "G2_instruction.json": "82d569cd0fc8fc742a15a3011fb5cd6a8b11e0a5b344c884602347439f43cad7",
                    "G3_instruction.json": "f923d1a9452646bd1a415b266117d90675d0f8fc04cf014db58d3cd78c25634f",
                },
            ),
            trace_texts.tool_search,
        ),
        Source(
            "flask_releases",
            "github.com/pallets/flask, docs of 2.1.3, 2.2.5, 2.3.3, 3.0.3 and 3.1.2 (sums/flask.sha256)",
            "BSD-3-Clause",
            _BM25,
            10,
            _listed_files("flask"),
            lambda data: searched(trace_texts.releases(data, _FLASK_RELEASES), 10, with_texts=True),
        ),
        _searched(
            "werkzeug_code",
            "github.com/pallets/werkzeug at 1b00618, modules and tests (sums/werkzeug.sha256)",
            "BSD-3-Clause",
            10,
            _listed_files("werkzeug"),
            trace_texts.tested_code,
        ),
    )
}
_DENSE = {
    "xquad_en": trace_texts.squad,
    "pubmedqa_sections": trace_texts.pubmed,
    "tatqa_reports": trace_texts.financial_reports,
    "cosqa_functions": trace_texts.functions,
}
SOURCES: Mapping[str, Source] = {
    **_PUBLISHED,
    **{f"{name}_dense": _dense(f"{name}_dense", _PUBLISHED[name], read) for name, read in _DENSE.items()},
}
