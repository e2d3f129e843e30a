"""The notebook, run from top to bottom, compared with the outputs that are stored in it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/prefix_cache.ipynb"


def printed(notebook: Any) -> list[str]:
    return [output.text for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("text")]


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_each_cell_runs_and_the_numbers_are_those_stored(tmp_path: Path) -> None:
    stored = nbformat.read(NOTEBOOK, 4)
    run = nbformat.read(NOTEBOOK, 4)
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that run kernels
        folder = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(run, timeout=300, coalesce_streams=True, resources=folder).execute()
    assert pictures(run) == pictures(stored) == 3
    expected, found = (json.loads(printed(notebook)[-1]) for notebook in (stored, run))
    if found["text"] == expected["text"]:  # the same version of the standard library
        assert printed(run) == printed(stored)
    assert found["cached"]["with"] > 2 * found["cached"]["without"]
    assert found["computed"]["with"] < 0.85 * found["computed"]["without"]
    for before, after in zip(found["hit_ratios"]["relevance"], found["hit_ratios"]["coaccess"], strict=True):
        assert after > 1.5 * before
    assert found.keys() == expected.keys()


def test_the_notebook_is_small_and_its_sentences_are_short() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    cells = nbformat.read(NOTEBOOK, 4).cells
    assert all(output.output_type != "error" for cell in cells for output in cell.get("outputs", ()))
    for cell in cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            for sentence in re.split(r"[.:?!](?=\s)|\n\n|\n- ", text):
                assert len(sentence.split()) <= 30, sentence
