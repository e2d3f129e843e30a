"""Requirements and effects of importing the package."""

from __future__ import annotations

import subprocess
import sys

import warmprefix_langchain
from warmprefix import MissingExtraError


def run(*lines: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_import_without_langchain_names_the_install_command() -> None:
    printed = run(
        "import sys",
        "sys.modules['langchain_core'] = None",
        "from warmprefix import MissingExtraError",
        "try:",
        "    import warmprefix_langchain",
        "except MissingExtraError as error:",
        "    print(error)",
    )
    assert printed == str(MissingExtraError("langchain", "langchain_core"))


def test_chains_do_not_import_agents() -> None:
    assert run("import sys, warmprefix_langchain", "print('langgraph' in sys.modules)") == "False"


def test_public_names_are_documented() -> None:
    assert all(getattr(warmprefix_langchain, name).__doc__ for name in warmprefix_langchain.__all__)
    assert not hasattr(warmprefix_langchain, "ContextReuseAgent")
