"""What importing the package needs and brings."""

from __future__ import annotations

import subprocess
import sys

import warmprefix_langchain
from warmprefix import MissingExtraError


def run(*lines: str) -> str:
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_without_langchain_it_says_what_to_install() -> None:
    said = run(
        "import sys",
        "sys.modules['langchain_core'] = None",
        "from warmprefix import MissingExtraError",
        "try:",
        "    import warmprefix_langchain",
        "except MissingExtraError as error:",
        "    print(error)",
    )
    assert said == str(MissingExtraError("langchain", "langchain_core"))


def test_chains_do_not_bring_agents_with_them() -> None:
    assert run("import sys, warmprefix_langchain", "print('langgraph' in sys.modules)") == "False"


def test_all_that_is_public_is_listed() -> None:
    names = [name for name in warmprefix_langchain.__all__ if name != "ContextReuseMiddleware"]
    assert all(vars(warmprefix_langchain)[name].__doc__ for name in names)
    assert run("import warmprefix_langchain as w", "print(hasattr(w, 'ContextReuseAgent'))") == "False"
