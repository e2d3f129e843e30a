"""What importing the package needs and brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import warmprefix_chain_of_agents
from warmprefix import MissingExtraError


def run(*lines: str) -> str:
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_without_openai_the_error_names_the_command() -> None:
    message = run(
        "import sys",
        "sys.modules['openai'] = None",
        "from warmprefix import MissingExtraError",
        "try:",
        "    import warmprefix_chain_of_agents",
        "except MissingExtraError as error:",
        "    print(error)",
    )
    assert message == str(MissingExtraError("chain-of-agents", "openai"))


def test_it_brings_no_framework_with_it() -> None:
    loaded = run("import sys, warmprefix_chain_of_agents", "print({'langgraph', 'workflows'} & set(sys.modules))")
    assert loaded == "set()"


def test_all_that_is_public_is_documented() -> None:
    for name in warmprefix_chain_of_agents.__all__:
        assert getattr(warmprefix_chain_of_agents, name).__doc__, name


def test_the_package_is_typed() -> None:
    assert Path(warmprefix_chain_of_agents.__file__).with_name("py.typed").exists()
