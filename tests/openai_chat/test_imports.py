"""Imports of `warmprefix_openai`: nothing optional before the first request, and a command if it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from warmprefix import MissingExtraError


def run(*lines: str) -> str:
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_planning_a_batch_imports_no_client() -> None:
    loaded = "print(sorted({'openai', 'stamina', 'httpx', 'sqlite3', 'warmprefix_openai'} & set(sys.modules)))"
    assert run("import sys, warmprefix.batch.plan", loaded) == "[]"


def test_importing_the_package_imports_no_optional_dependency() -> None:
    loaded = "print(sorted({'openai', 'stamina', 'tenacity', 'httpx', 'httpx2'} & set(sys.modules)))"
    assert run("import sys", "from warmprefix_openai import BatchRunner, EngineLink, Retries", loaded) == "[]"


@pytest.mark.parametrize("module", ["openai", "stamina"])
@pytest.mark.parametrize("use", ["ChatAsker", "BatchRunner(batch).run(None, 'm')"])
def test_a_missing_dependency_names_the_command(module: str, use: str) -> None:
    message = run(
        "import sys, warmprefix, warmprefix_openai",
        f"sys.modules[{module!r}] = None",
        "batch = warmprefix.ContextPlanner().plan_batch([])",
        "try:",
        f"    warmprefix_openai.{use}",
        "except warmprefix.MissingExtraError as error:",
        "    print(error)",
    )
    assert message == str(MissingExtraError("openai", module))


def test_every_public_name_is_there_and_documented() -> None:
    import warmprefix_openai

    for name in warmprefix_openai.__all__:
        public = getattr(warmprefix_openai, name)
        assert isinstance(public, str) or public.__doc__, name
    with pytest.raises(AttributeError, match=r"module 'warmprefix_openai' has no attribute 'nonsense'"):
        _ = warmprefix_openai.nonsense
