"""The package as a whole: what importing it costs, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import warmprefix

ROOT = Path(__file__).parent.parent


def in_fresh_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)


def test_importing_pulls_in_nothing_but_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import warmprefix; print(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in in_fresh_python(code).stdout.split()}
    assert loaded - set(sys.stdlib_module_names) - {"numpy"} == {"warmprefix"}


def test_importing_and_planning_print_nothing() -> None:
    code = "import warmprefix; p = warmprefix.ContextPlanner(); p.commit(p.plan(['a', 'b'])); p.plan([]).render()"
    done = in_fresh_python(code, "-W", "error", "-X", "dev")
    assert (done.stdout, done.stderr) == ("", "")


def test_all_public_names_exist_and_are_documented() -> None:
    for name in warmprefix.__all__:
        assert getattr(warmprefix, name).__doc__ or name == "Placement"


def test_the_package_is_typed() -> None:
    assert (ROOT / "core/warmprefix/py.typed").exists()
