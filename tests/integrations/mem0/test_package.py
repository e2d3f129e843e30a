"""Use of the package without Mem0, and the error if Mem0 is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import warmprefix_mem0
from warmprefix import MissingExtraError

WITHOUT = "import sys; sys.modules['mem0'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_chat_needs_no_mem0() -> None:
    done = run(WITHOUT + "from warmprefix_mem0 import MemoryChat; print(MemoryChat().ask('?', ['a'])[0]['role'])")
    assert (done.returncode, done.stdout) == (0, "user\n"), done.stderr


@pytest.mark.parametrize("name", ["register", "ContextReuseReranker"])
def test_reranker_without_mem0_names_the_command_that_installs_it(name: str) -> None:
    done = run(WITHOUT + f"from warmprefix_mem0 import {name}")
    assert f"MissingExtraError: {MissingExtraError('mem0', 'mem0')}" in done.stderr


def test_importing_it_does_not_import_mem0() -> None:
    done = run("import sys, warmprefix_mem0; print('mem0' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_all_public_names_exist() -> None:
    for name in warmprefix_mem0.__all__:
        assert getattr(warmprefix_mem0, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Memory'"):
        warmprefix_mem0.Memory  # noqa: B018
