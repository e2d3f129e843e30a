"""What each plugin saves: the same application with and without its one line, against the emulator over HTTP.

    WARMPREFIX_TRACES=folder python benchmarks/plugin_hit_ratio.py [--turns 200]

Questions and passages are those of the demo, on the Python standard library's documentation; where the folder that
`WARMPREFIX_TRACES` names has `xquad_squad.text.jsonl.gz`, its questions on its paragraphs too, four per conversation.
Every arm has its own engine, whose metrics give the hit ratio and the tokens left to prefill. Labels, notes and
references count as prompt tokens. A framework's rows are measured where it is installed, and those of
the others stay as they are in `results/plugin_hit_ratio.csv`, so run this once in each framework's environment. Only a
run with the default `--turns` is written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table
from result_files import write_rows
from warmprefix import Choice, ContextBlock
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

PASSAGES = 10
CANDIDATES = 25
"""What is chosen from: 2.5 per passage, as plugins do."""
MEMORIES = 10
USERS = 10
TURNS_A_CONVERSATION = 4
BUNDLE = "xquad_squad.text.jsonl.gz"
INSTRUCTIONS = "Answer from the context, and point out if the answer is not in it."
HEADER = ["", "text", "hit ratio %", "", "to prefill", "", "prompt tokens", ""]


class Turn(NamedTuple):
    """A question, and the passages that the retriever found for it, best first."""

    conversation: int
    question: str
    candidates: Sequence[tuple[ContextBlock, float]]
    """The passages and those behind them, with their scores."""

    @property
    def passages(self) -> tuple[ContextBlock, ...]:
        return tuple([block for block, _ in self.candidates[:PASSAGES]])


class Arm(NamedTuple):
    """One application, with the plugin's line or without: serves all turns, given the engine's base URL and model."""

    what: str
    serve: Callable[[str, str, Sequence[Turn], bool], None]
    text: str | None = None
    """The only text to serve; None for all."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    count: int = parser.parse_args().turns
    installed = {framework: part for framework, part in PARTS.items() if find_spec(part[0]) is not None}
    for framework in PARTS.keys() - installed.keys():
        print(f"{framework} is not installed: its rows stay as they are")
    corpora = dict(read_corpora(count)) if installed else {}
    results: list[dict[str, Any]] = []
    for framework, (_, distributions, arms) in installed.items():
        made = {"versions": {name: version(name) for name in distributions}}
        for text, turns in corpora.items():
            for arm in [arm for arm in arms if arm.text in (None, text)]:
                sides = {side: served(arm, turns, side == "with") for side in ("without", "with")}
                results.append({"framework": framework, "what": arm.what, "text": text, **sides, "made": made})
    print()
    keys = ("hit_percent", "prefilled_tokens", "prompt_tokens")
    print_table(
        HEADER,
        [
            [row["what"], row["text"], *(row[side][key] for key in keys for side in ("without", "with"))]
            for row in results
        ],
    )
    if count == parser.get_default("turns"):
        write_rows("plugin_hit_ratio", results, ("framework", "what", "text"))


def served(arm: Arm, turns: Sequence[Turn], plugin: bool) -> dict[str, float]:
    """Run the application and return what the engine counted."""
    config = EmulatorConfig(kv_blocks=32_768, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with EmulatorServer(config) as server:
        arm.serve(server.base_url, config.model, turns, plugin)
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            metrics: str = answer.read().decode()
    prompt, cached = (counter(metrics, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    return {
        "hit_percent": round(100 * cached / prompt, 1),
        "prompt_tokens": round(prompt),
        "prefilled_tokens": round(prompt - cached),
    }


def counter(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", metrics, re.MULTILINE))


def read_corpora(count: int) -> Iterator[tuple[str, list[Turn]]]:
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    yield (
        "standard library",
        [
            Turn(asked.conversation, asked.text, retriever.scored(asked.query, CANDIDATES))
            for asked in ask(entries, count, seed=0)
        ],
    )
    bundle = Path(os.environ.get("WARMPREFIX_TRACES", "")) / BUNDLE
    if bundle.is_file():
        with gzip.open(bundle, "rt", encoding="utf-8") as lines:
            _, *records = map(json.loads, lines)
        retriever = Bm25Retriever([ContextBlock(r["text"], id=f"p{r['block']}") for r in records if "block" in r])
        questions = [record["text"] for record in records if "query" in record][:count]
        yield (
            "xquad",
            [
                Turn(i // TURNS_A_CONVERSATION, question, retriever.scored(question, CANDIDATES))
                for i, question in enumerate(questions)
            ],
        )


# -- LangChain -------------------------------------------------------------------------------------------------------


def langchain_chain(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    langchain_stuff_chain(base_url, model, turns, {} if plugin else None)


def langchain_annotated_chain(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    langchain_stuff_chain(base_url, model, turns, {"annotate": "auto"} if plugin else None)


def langchain_choosing_chain(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Let a compressor choose the passages, as behind a reranker."""
    document = import_module("langchain_core.documents").Document
    retriever = import_module("langchain_core.runnables").RunnableLambda(
        lambda number: [
            document(p.text, id=p.id, metadata={"relevance_score": score}) for p, score in turns[int(number)].candidates
        ]
    )
    compressor = import_module("warmprefix_langchain").ContextReuseCompressor(choose=Choice(k=PASSAGES))
    chosen = import_module("langchain_classic.retrievers").ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=retriever
    )
    langchain_stuff_chain(base_url, model, turns, None, chosen if plugin else None)


def langchain_stuff_chain(
    base_url: str, model: str, turns: Sequence[Turn], options: dict[str, str] | None, retriever: Any = None
) -> None:
    """`options` are the retriever's; None for the chain without it."""
    chains, combine = (
        import_module("langchain_classic.chains"),
        import_module("langchain_classic.chains.combine_documents"),
    )
    core, prompts = import_module("langchain_core.documents"), import_module("langchain_core.prompts")
    retriever = retriever or import_module("langchain_core.runnables").RunnableLambda(
        lambda number: [core.Document(p.text, id=p.id) for p in turns[int(number)].passages]
    )
    if options is not None:
        retriever = import_module("warmprefix_langchain").ContextReuseRetriever(retriever=retriever, **options)
    chat = import_module("langchain_openai").ChatOpenAI(model=model, base_url=base_url, api_key="none", max_tokens=16)
    prompt = prompts.ChatPromptTemplate.from_messages(
        [("system", f"{INSTRUCTIONS}\n\n{{context}}"), ("human", "{question}")]
    )
    chain = chains.create_retrieval_chain(
        import_module("langchain_core.runnables").RunnableLambda(lambda given: given["number"]) | retriever,
        combine.create_stuff_documents_chain(chat, prompt),
    )
    for number, turn in enumerate(turns):
        chain.invoke({"number": str(number), "question": turn.question, "input": turn.question})


def langchain_agent(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Run an agent that a script makes search once per turn: the emulator answers only noise."""
    messages, core = import_module("langchain_core.messages"), import_module("langchain_core.documents")
    base: Any = import_module("langchain_openai").ChatOpenAI
    found: list[Any] = []

    class Searches(base):  # type: ignore[misc]
        def _generate(self, given: list[Any], *args: Any, **kwargs: Any) -> Any:
            result = super()._generate(given, *args, **kwargs)
            if given[-1].type == "human":
                call = {"name": "search", "args": {"query": given[-1].content}, "id": f"call_{len(given)}"}
                result.generations[0].message = messages.AIMessage("", tool_calls=[call])
            return result

    def search(query: str) -> tuple[str, list[Any]]:
        """Find passages."""
        return "\n\n".join(document.page_content for document in found), list(found)

    tool = import_module("langchain_core.tools").StructuredTool.from_function(
        search, response_format="content_and_artifact"
    )
    reuse = [import_module("warmprefix_langchain").ContextReuseMiddleware()] if plugin else []
    agent = import_module("langchain.agents").create_agent(
        Searches(model=model, base_url=base_url, api_key="none", max_tokens=16),
        [tool],
        system_prompt=INSTRUCTIONS,
        middleware=reuse,
        checkpointer=import_module("langgraph.checkpoint.memory").InMemorySaver(),
    )
    for turn in turns:
        found[:] = [core.Document(p.text, id=p.id) for p in turn.passages]
        thread = {"configurable": {"thread_id": str(turn.conversation)}}
        agent.invoke({"messages": [messages.HumanMessage(turn.question)]}, thread)


# -- LlamaIndex ------------------------------------------------------------------------------------------------------


def llamaindex_query_engine(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    llamaindex_queries(base_url, model, turns, llamaindex_plugin(plugin), PASSAGES)


def llamaindex_choosing_engine(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Feed as many passages as without the plugin, out of more."""
    steps = llamaindex_plugin(plugin, choose=Choice(k=PASSAGES))
    llamaindex_queries(base_url, model, turns, steps, CANDIDATES if plugin else PASSAGES)


def llamaindex_queries(base_url: str, model: str, turns: Sequence[Turn], steps: Sequence[Any], top_k: int) -> None:
    engine_of = import_module("llama_index.core.query_engine").RetrieverQueryEngine.from_args
    engine = engine_of(
        llamaindex_retriever(turns, top_k), llm=llamaindex_model(base_url, model), node_postprocessors=steps
    )
    for turn in turns:
        engine.query(turn.question)


def llamaindex_chat_engine(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    chat_engine = import_module("llama_index.core.chat_engine").ContextChatEngine
    buffer = import_module("llama_index.core.memory").ChatMemoryBuffer
    chats: dict[int, Any] = {}
    llm, retriever, postprocessors = (
        llamaindex_model(base_url, model),
        llamaindex_retriever(turns),
        llamaindex_plugin(plugin),
    )
    for turn in turns:
        if turn.conversation not in chats:
            chats[turn.conversation] = chat_engine.from_defaults(
                retriever,
                llm=llm,
                memory=buffer.from_defaults(token_limit=50_000),
                node_postprocessors=postprocessors,
            )
        chats[turn.conversation].chat(turn.question)


def llamaindex_neighbours(
    base_url: str, model: str, turns: Sequence[Turn], plugin: bool, *, linked: bool = True
) -> None:
    """Ask with the three best passages and the neighbours of each in its module; unlinked, no passage names them."""
    schema = import_module("llama_index.core.schema")
    postprocessor = import_module("llama_index.core.postprocessor")
    docstore = import_module("llama_index.core.storage.docstore").SimpleDocumentStore()
    modules: dict[str, list[Any]] = {}
    for entry in read_standard_library():
        nodes = [schema.TextNode(text=block.text, id_=block.id) for block in entry.blocks]
        modules.setdefault(entry.module, []).extend(nodes)
    for nodes in modules.values():
        for before, after in pairwise(nodes):
            before.relationships[schema.NodeRelationship.NEXT] = after.as_related_node_info()
            after.relationships[schema.NodeRelationship.PREVIOUS] = before.as_related_node_info()
        docstore.add_documents(nodes)
    by_id = {node.node_id: node for nodes in modules.values() for node in nodes}
    around = postprocessor.PrevNextNodePostprocessor(docstore=docstore, num_nodes=1, mode="both")
    after_retrieval = llamaindex_plugin(plugin)
    synthesizer = import_module("llama_index.core.response_synthesizers").get_response_synthesizer(
        llm=llamaindex_model(base_url, model)
    )
    for turn in turns:
        found = [schema.NodeWithScore(node=by_id[passage.id]) for passage in turn.passages[:3]]
        found = around.postprocess_nodes(found)
        if not linked:
            found = [
                schema.NodeWithScore(node=each.node.model_copy(update={"relationships": {}}), score=each.score)
                for each in found
            ]
        for step in after_retrieval:
            found = step.postprocess_nodes(found)
        synthesizer.synthesize(turn.question, found)


def llamaindex_unlinked_neighbours(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    llamaindex_neighbours(base_url, model, turns, plugin, linked=False)


def llamaindex_retriever(turns: Sequence[Turn], top_k: int = PASSAGES) -> Any:
    schema = import_module("llama_index.core.schema")
    base: Any = import_module("llama_index.core.base.base_retriever").BaseRetriever
    remaining = iter(turns)

    class Ready(base):  # type: ignore[misc]
        def _retrieve(self, query_bundle: Any) -> list[Any]:
            turn = next(remaining)
            assert query_bundle.query_str == turn.question
            return [
                schema.NodeWithScore(node=schema.TextNode(text=passage.text, id_=passage.id), score=score)
                for passage, score in turn.candidates[:top_k]
            ]

    return Ready()


def llamaindex_plugin(plugin: bool, **options: Any) -> list[Any]:
    return [import_module("warmprefix_llamaindex").ContextReusePostprocessor(**options)] if plugin else []


def llamaindex_model(base_url: str, model: str) -> Any:
    like = import_module("llama_index.llms.openai_like").OpenAILike
    return like(
        model=model, api_base=base_url, api_key="none", is_chat_model=True, context_window=100_000, max_tokens=16
    )


# -- Mem0 ------------------------------------------------------------------------------------------------------------


def mem0_system_prompt(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Memories in the system prompt, as in Mem0's own examples."""
    memory = mem0_memory(turns)
    if plugin:
        memory = import_module("warmprefix_mem0").ContextReuseMemory(memory)
    mem0_chat(base_url, model, turns, memory)


def mem0_chosen_memories(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Do the same with as many memories, out of more."""
    memory = mem0_memory(turns)
    if plugin:
        memory = import_module("warmprefix_mem0").ContextReuseMemory(memory, choose=Choice(k=MEMORIES))
    mem0_chat(base_url, model, turns, memory)


def mem0_memory_chat(base_url: str, model: str, turns: Sequence[Turn], plugin: bool) -> None:
    """Do the same with `MemoryChat`."""
    memory = mem0_memory(turns)
    if not plugin:
        mem0_chat(base_url, model, turns, memory)
        return
    chat_class = import_module("warmprefix_mem0").MemoryChat
    chats: dict[int, Any] = {}
    with import_module("openai").OpenAI(base_url=base_url, api_key="none") as client:
        for turn in turns:
            chat = chats.setdefault(turn.conversation, chat_class(INSTRUCTIONS))
            messages = chat.ask(turn.question, mem0_search(memory, turn))
            chat.commit(messages, mem0_answer(client, model, messages))


def mem0_chat(base_url: str, model: str, turns: Sequence[Turn], memory: Any) -> None:
    histories: dict[int, list[Any]] = {}
    with import_module("openai").OpenAI(base_url=base_url, api_key="none") as client:
        for turn in turns:
            found = mem0_search(memory, turn)
            memories = "\n".join(f"- {entry['memory']}" for entry in found["results"])
            history = histories.setdefault(turn.conversation, [])
            history.append({"role": "user", "content": turn.question})
            system = {"role": "system", "content": f"{INSTRUCTIONS}\n{memories}"}
            history.append({"role": "assistant", "content": mem0_answer(client, model, [system, *history])})


def mem0_search(memory: Any, turn: Turn) -> Any:
    return memory.search(
        turn.question, filters={"user_id": f"user-{turn.conversation % USERS}"}, top_k=MEMORIES, threshold=0.0
    )


def mem0_answer(client: Any, model: str, messages: list[Any]) -> str:
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16)
    return answer.choices[0].message.content or ""


def mem0_memory(turns: Sequence[Turn]) -> Any:
    """Return a real Mem0 in which each user has read the best three passages of each of their questions."""
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    base: Any = import_module("mem0.embeddings.base").EmbeddingBase

    class HashedWords(base):  # type: ignore[misc]
        def embed(self, text: str, memory_action: str | None = None) -> list[float]:
            vector = [0.0] * 256
            for word in re.findall(r"\w{3,}", text.lower()):
                vector[zlib.crc32(word.encode()) % 256] += 1.0
            length = math.sqrt(sum(x * x for x in vector)) or 1.0
            return [x / length for x in vector]

    never_asked = {"provider": "openai", "config": {"api_key": "none"}}
    client = import_module("qdrant_client").QdrantClient(":memory:")
    store = {"client": client, "collection_name": "memories", "embedding_model_dims": 256}
    memory = import_module("mem0").Memory.from_config(
        {
            "vector_store": {"provider": "qdrant", "config": store},
            "embedder": never_asked,
            "llm": never_asked,
            "history_db_path": ":memory:",
        }
    )
    memory.embedding_model = HashedWords()
    for user, text in dict.fromkeys((t.conversation % USERS, p.text) for t in turns for p in t.passages[:3]):
        memory.add(text, user_id=f"user-{user}", infer=False)
    return memory


PARTS: dict[str, tuple[str, Sequence[str], Sequence[Arm]]] = {
    "langchain": (
        "langchain_openai",
        ["langchain", "langchain-core"],
        [
            Arm("LangChain chain: ContextReuseRetriever", langchain_chain),
            Arm('LangChain chain: the same, annotate="auto"', langchain_annotated_chain),
            Arm("LangChain chain: ContextReuseCompressor with choose=Choice(k=10)", langchain_choosing_chain),
            Arm("LangChain agent: ContextReuseMiddleware", langchain_agent),
        ],
    ),
    "llamaindex": (
        "llama_index",
        ["llama-index-core"],
        [
            Arm("LlamaIndex query engine: ContextReusePostprocessor", llamaindex_query_engine),
            Arm(
                "LlamaIndex query engine: ContextReusePostprocessor with choose=Choice(k=10)",
                llamaindex_choosing_engine,
            ),
            Arm("LlamaIndex chat engine: ContextReusePostprocessor", llamaindex_chat_engine),
            Arm("LlamaIndex behind PrevNextNodePostprocessor", llamaindex_neighbours, "standard library"),
            Arm(
                "LlamaIndex behind PrevNextNodePostprocessor, relationships removed",
                llamaindex_unlinked_neighbours,
                "standard library",
            ),
        ],
    ),
    "mem0": (
        "mem0",
        ["mem0ai"],
        [
            Arm("Mem0, memories in the system prompt: ContextReuseMemory", mem0_system_prompt),
            Arm(
                "Mem0, memories in the system prompt: ContextReuseMemory with choose=Choice(k=10)", mem0_chosen_memories
            ),
            Arm("Mem0: MemoryChat in place of the system prompt", mem0_memory_chat),
        ],
    ),
}


if __name__ == "__main__":
    main()
