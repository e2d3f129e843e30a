"""The core runs alone: without its siblings, and without anything that is not in the standard library."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.without_siblings import SIBLINGS, core_tests

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

FIRST_BLOCK = """
from types import SimpleNamespace

passages = [SimpleNamespace(text=f"Passage {i}. " * 20, id=str(i)) for i in range(3)]
retriever = SimpleNamespace(search=lambda question: passages)
sent = []
completions = SimpleNamespace(create=lambda **request: sent.append(request))
client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
model, question = "m", "Which?"
{block}
assert all(passage.text.strip() in sent[0]["messages"][0]["content"] for passage in passages)
print(sorted(name for name in sys.modules if name.startswith("warmprefix_")))
"""


def test_the_core_alone_runs_the_first_block_of_the_readme(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(from warmprefix import.*?)```", README, re.DOTALL)[0]
    shutil.copytree(ROOT / "core/warmprefix", tmp_path / "warmprefix")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + FIRST_BLOCK.replace("{block}", block)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_core_names_none_of_its_siblings() -> None:
    for path in (ROOT / "core/warmprefix").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {module.partition(".")[0] for module in modules} & SIBLINGS, path


def test_enough_tests_run_without_siblings() -> None:
    """`python3 run.py test --all` runs them in a process of their own, in which importing a sibling raises."""
    files = set(core_tests())
    assert {
        "tests/planner/test_planner.py",
        "tests/planner/test_invariants.py",
        "tests/batch/test_plan_batch.py",
    } <= files
    assert len(files) >= 30
