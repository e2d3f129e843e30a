"""The code of the texts for LangChain's documentation, run unchanged against an emulated engine."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

UPSTREAM = Path(__file__).parents[3] / "docs/upstream"
CODE = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _closed_connections() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the pages leave their connections open
        gc.collect()


def run_page(name: str, engine: Any) -> dict[str, Any]:
    names: dict[str, Any] = {}
    blocks = CODE.findall((UPSTREAM / name).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        assert "Qwen/Qwen3-8B" in block or "ChatOpenAI(" not in block
        here = block.replace("http://localhost:8000/v1", engine.base_url).replace("Qwen/Qwen3-8B", engine.model)
        exec(compile(here, name, "exec"), names)
    return names


def test_the_middlewares_page_sends_a_repeated_result_once(
    start_engine: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start_engine()
    for turn in range(2):
        function = {"name": "handbook", "arguments": json.dumps({"topic": "returns"})}
        call = {"id": f"call-{turn}", "type": "function", "function": function}
        engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
        engine.script({"role": "assistant", "content": f"That was turn {turn}."})
    names = run_page("langchain_middleware.mdx", engine)
    assert capsys.readouterr().out == "1 repeated results became references\n"
    assert engine.prompts[-1].count(names["HANDBOOK"]) == 1
    assert names["state"]["messages"][-1].content == "That was turn 1."


def test_the_retrievers_page_answers_with_all_documents(start_engine: Callable[[], Any]) -> None:
    engine = start_engine()
    names = run_page("langchain_retriever.mdx", engine)
    assert len(names["documents"]) == 4
    assert names["answer"]
    assert all(document.page_content in engine.prompts[-1] for document in names["documents"])


def test_the_listing_names_public_classes() -> None:
    import warmprefix_langchain

    listing = (UPSTREAM / "langchain_listing.yaml").read_text(encoding="utf-8")
    listed = re.findall(r"^- name: (\w+)$", listing, re.MULTILINE)
    assert len(listed) == 2
    assert set(listed) <= set(warmprefix_langchain.__all__)
