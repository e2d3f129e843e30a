"""`warmprefix record` never makes an application fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GONE = """
import os, tempfile
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
import warmprefix
planner = warmprefix.ContextPlanner()
print(planner.plan(["evidence"]).render().endswith("evidence"))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows does not remove a directory that is in use")
def test_a_planner_works_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GONE],
        env={**os.environ, "WARMPREFIX_RECORD": "day.jsonl"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "cannot record to day.jsonl" in done.stderr
