"""The code of the text for LlamaIndex's documentation, run unchanged against an emulated engine."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs/upstream/llamaindex_postprocessor.mdx"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


async def test_the_page_runs(start_engine: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine = start_engine()
    names: dict[str, Any] = {}
    blocks = CODE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 2
    for block in blocks:
        here = block.replace("http://localhost:8000/v1", engine.base_url).replace("Qwen/Qwen3-8B", engine.model)
        exec(compile(here, PAGE.name, "exec"), names)
    assert capsys.readouterr().out.strip()
    assert engine.prompts[-1].count("of the handbook.") == 80
    engine.script({"role": "assistant", "content": "Five days."})
    assert str(await names["main"]()) == "Five days."
    names.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the page leaves its connections open
        gc.collect()
