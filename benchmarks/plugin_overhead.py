"""What each plugin costs a call, over what the core costs on the same 15 texts.

    python benchmarks/plugin_overhead.py [--samples 2000]

The overhead is the plugin's call, less the call of what it wraps, less the core alone: `ContextBlock`s, `plan()` and
`commit()`, or for agents a `Transcript` that receives the same calls and results. All are timed on every request, in
turn, and subtracted request by request. Of the overhead, "framework" is what a step of the same kind costs that does
nothing: the frameworks trace the runs of their parts.

Requests are Zipf-distributed, as in `plan_overhead.py`; a hundred are served before the first that counts. Retrievers,
memories and models that are wrapped hold their answers ready. A framework's rows are measured where it is installed;
those of the others in `results/plugin_overhead.csv` stay, so run this once in each framework's environment. Only a run
with the default `--samples` is written.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from common import percentile, print_table, zipf_requests
from result_files import write_rows
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_requests import Transcript

KILOBYTES = (1, 4)
WARM_UP = 100
TURNS = 3
"""Number of tool messages that hold the 15 blocks of an agent's history."""

WORDS = ["prefix", "cache", "of", "the", "engine", "holds", "a", "block", "and", "its", "tokens"]
QUESTION = "Which block does the engine hold?"
HEADER = ["", "kB a block", "p50 µs", "p99 µs", "framework", "plugin", "wrapped", "core"]


@dataclass(frozen=True)
class Case:
    """One plugin. Each function takes what `prepare` makes of a request's blocks."""

    what: str
    prepare: Callable[[list[ContextBlock]], Any]
    plugin: Callable[[Any], object]
    core: Callable[[list[ContextBlock]], object]
    wrapped: Callable[[Any], object] | None = None
    """What the plugin calls in its turn."""
    nothing: Callable[[Any], object] | None = None
    """A step of the framework's of the plugin's kind, around `wrapped`, that does nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2_000)
    samples: int = parser.parse_args().samples
    results: list[dict[str, Any]] = []
    for framework, (module, distributions, cases) in PARTS.items():
        if find_spec(module) is None:
            print(f"{framework} is not installed: its rows stay as they are")
            continue
        versions = {name: version(name) for name in distributions}
        print(f"{framework} is measured: {versions}")
        for kilobytes in KILOBYTES:
            corpus = blocks_of(kilobytes)
            for case in cases():
                row = measured(case, corpus, samples)
                made = {"made": {"versions": versions}}
                results.append({"framework": framework, "what": case.what, "kilobytes": kilobytes, **row, **made})
    columns = ["overhead_p50_us", "overhead_p99_us", "framework_p50_us", "plugin_p50_us", "wrapped_p50_us"]
    print()
    print_table(HEADER, [[row[key] for key in ("what", "kilobytes", *columns, "core_p50_us")] for row in results])
    if samples == parser.get_default("samples"):
        write_rows("plugin_overhead", results, ("framework", "what", "kilobytes"))


def blocks_of(kilobytes: int) -> list[ContextBlock]:
    rng = random.Random(3)
    texts = (" ".join(rng.choices(WORDS, k=260 * kilobytes))[: 1_024 * kilobytes] for _ in range(50 * 60))
    return [ContextBlock(text, id=f"passage-{i}") for i, text in enumerate(texts)]


def measured(case: Case, corpus: Sequence[ContextBlock], samples: int) -> dict[str, float]:
    """Microseconds. The functions take turns in going first."""
    functions: dict[str, Callable[[Any], object] | None] = {
        "plugin": case.plugin,
        "core": case.core,
        "wrapped": case.wrapped,
        "nothing": case.nothing,
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    gc.collect()
    gc.freeze()
    for number, request in enumerate(zipf_requests(WARM_UP + samples, topics=50, seed=4)):
        blocks = [corpus[i] for i in request]
        given = case.prepare(blocks)
        for name in names[number % 4 :] + names[: number % 4]:
            function, argument = functions[name], blocks if name == "core" else given
            start = time.perf_counter()
            if function is not None:
                function(argument)
            times[name].append((time.perf_counter() - start) * 1e6 if function else 0.0)
    gc.unfreeze()
    plugin, core, wrapped, nothing = (times[name][WARM_UP:] for name in names)
    overhead = [a - b - c for a, b, c in zip(plugin, core, wrapped, strict=True)]
    own = [a - b for a, b in zip(nothing, wrapped, strict=True)] if case.nothing else [0.0]
    return {
        "overhead_p50_us": round(statistics.median(overhead), 1),
        "overhead_p99_us": round(percentile(overhead, 99), 1),
        "framework_p50_us": round(statistics.median(own), 1),
        "plugin_p50_us": round(statistics.median(plugin), 1),
        "wrapped_p50_us": round(statistics.median(wrapped), 1),
        "core_p50_us": round(statistics.median(core), 1),
    }


def planned(planner: ContextPlanner | None = None) -> Callable[[list[ContextBlock]], object]:
    """Return the core's part in a head placement."""
    planner = ContextPlanner() if planner is None else planner

    def plan(blocks: list[ContextBlock]) -> None:
        planner.commit(planner.plan([ContextBlock(block.text, id=block.id) for block in blocks]))

    return plan


def transcribed(blocks: list[ContextBlock]) -> None:
    """Run the core's part in an agent's model call."""
    transcript = Transcript()
    for number, turn in enumerate(turns_of(blocks)):
        texts = [block.text for block in turn]
        transcript.call(f"call_{number}", "search", "{}")
        transcript.result(f"call_{number}", "\n\n".join(texts), texts)


def turns_of(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    size = len(items) // TURNS
    return (items[i * size : (i + 1) * size] for i in range(TURNS))


def langchain_cases() -> Iterator[Case]:
    documents, messages = import_module("langchain_core.documents"), import_module("langchain_core.messages")
    runnables, retrievers = import_module("langchain_core.runnables"), import_module("langchain_core.retrievers")
    middleware = import_module("langchain.agents.middleware")
    plugins = import_module("warmprefix_langchain")
    base: Any = retrievers.BaseRetriever
    found: list[Any] = []

    class Found(base):  # type: ignore[misc]
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Any]:
            return list(found)

    class Around(base):  # type: ignore[misc]
        retriever: Any

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return self.retriever.invoke(query, {"callbacks": run_manager.get_child()})

    def as_documents(blocks: list[ContextBlock]) -> list[Any]:
        found[:] = [documents.Document(block.text, id=block.id, metadata={"source": "a file"}) for block in blocks]
        return list(found)

    def as_request(blocks: list[ContextBlock]) -> Any:
        history = [messages.HumanMessage(QUESTION)]
        for number, turn in enumerate(turns_of(as_documents(blocks))):
            call = {"name": "search", "args": {}, "id": f"call_{number}"}
            text = "\n\n".join(document.page_content for document in turn)
            history.append(messages.AIMessage("", tool_calls=[call]))
            history.append(messages.ToolMessage(text, tool_call_id=call["id"], name="search", artifact=list(turn)))
        return middleware.ModelRequest(
            model=None,  # type: ignore[arg-type, unused-ignore]
            system_prompt=None,
            messages=history,
            tool_choice=None,
            tools=[],
            response_format=None,
            state={"messages": history},
            runtime=None,
        )

    inner = Found()
    around, nothing = plugins.ContextReuseRetriever(retriever=inner), Around(retriever=inner)
    yield Case(
        "LangChain: ContextReuseRetriever.invoke",
        as_documents,
        lambda _: around.invoke(QUESTION),
        planned(),
        wrapped=lambda _: inner.invoke(QUESTION),
        nothing=lambda _: nothing.invoke(QUESTION),
    )
    compressor = plugins.ContextReuseCompressor()
    yield Case(
        "LangChain: ContextReuseCompressor.compress_documents",
        as_documents,
        lambda given: compressor.compress_documents(given, QUESTION),
        planned(),
    )
    step, identity = plugins.context_reuse(), runnables.RunnableLambda(lambda given: given)
    yield Case("LangChain: context_reuse().invoke", as_documents, step.invoke, planned(), nothing=identity.invoke)
    wrapper = plugins.ContextReuseMiddleware()
    yield Case(
        "LangChain: ContextReuseMiddleware.wrap_model_call",
        as_request,
        lambda request: wrapper.wrap_model_call(request, lambda _: None),
        transcribed,
    )


def llamaindex_cases() -> Iterator[Case]:
    schema, types = import_module("llama_index.core.schema"), import_module("llama_index.core.base.llms.types")
    postprocessors = import_module("llama_index.core.postprocessor.types")
    plugins = import_module("warmprefix_llamaindex")
    base: Any = postprocessors.BaseNodePostprocessor
    model: Any = import_module("llama_index.llms.openai_like").OpenAILike
    answer = types.ChatResponse(message=types.ChatMessage(role="assistant", content="The last."))

    class Nothing(base):  # type: ignore[misc]
        def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:
            return nodes

    class Ready(model):  # type: ignore[misc]
        def chat(self, messages: Any, **kwargs: Any) -> Any:
            return answer

    def as_nodes(blocks: list[ContextBlock]) -> list[Any]:
        return [
            schema.NodeWithScore(
                node=schema.TextNode(text=block.text, id_=block.id, metadata={"source": "a file"}), score=0.5
            )
            for block in blocks
        ]

    def as_history(blocks: list[ContextBlock]) -> list[Any]:
        history = [types.ChatMessage(role="user", content=QUESTION)]
        for number, turn in enumerate(turns_of(blocks)):
            key = f"call_{number}"
            call = {"id": key, "type": "function", "function": {"name": "search", "arguments": "{}"}}
            history.append(types.ChatMessage(role="assistant", blocks=[], additional_kwargs={"tool_calls": [call]}))
            texts = [types.TextBlock(text=f"{block.text}\n\n") for block in turn]
            history.append(types.ChatMessage(role="tool", blocks=texts, additional_kwargs={"tool_call_id": key}))
        return history

    postprocessor, nothing = plugins.ContextReusePostprocessor(), Nothing()
    yield Case(
        "LlamaIndex: ContextReusePostprocessor.postprocess_nodes",
        as_nodes,
        lambda nodes: postprocessor.postprocess_nodes(nodes, query_str=QUESTION),
        planned(),
        nothing=lambda nodes: nothing.postprocess_nodes(nodes, query_str=QUESTION),
    )
    ready = Ready(model="none", api_key="none", is_chat_model=True, is_function_calling_model=True)
    llm = plugins.ContextReuseLLM(llm=ready)
    yield Case("LlamaIndex: ContextReuseLLM.chat", as_history, llm.chat, transcribed, wrapped=ready.chat)


def mem0_cases() -> Iterator[Case]:
    plugins = import_module("warmprefix_mem0")
    found: list[dict[str, Any]] = []

    class Ready:
        def search(self, query: str, *, top_k: int = 20, filters: dict[str, Any] | None = None) -> dict[str, Any]:
            return {"results": list(found)}

    def as_memories(blocks: list[ContextBlock]) -> None:
        found[:] = [
            {"id": block.id, "memory": block.text, "hash": "", "metadata": None, "score": 0.5, "user_id": "ann"}
            for block in blocks
        ]

    def search(memory: Any) -> object:
        return memory.search(QUESTION, filters={"user_id": "ann"})

    memory = Ready()
    around = plugins.ContextReuseMemory(memory)
    yield Case(
        "Mem0: ContextReuseMemory.search",
        as_memories,
        lambda _: search(around),
        planned(ContextPlanner(policy=plugins.SteadyOrder)),
        wrapped=lambda _: search(memory),
    )


PARTS: dict[str, tuple[str, Sequence[str], Callable[[], Iterator[Case]]]] = {
    "langchain": ("langchain", ["langchain", "langchain-core"], langchain_cases),
    "llamaindex": ("llama_index", ["llama-index-core"], llamaindex_cases),
    "mem0": ("mem0", ["mem0ai"], mem0_cases),
}


if __name__ == "__main__":
    main()
