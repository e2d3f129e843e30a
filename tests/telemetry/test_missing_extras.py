"""Without the extras, counts work and an error names the package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from warmprefix import MissingExtraError


@pytest.mark.parametrize(
    ("module", "missing", "extra", "package"),
    [
        ("prometheus", "prometheus_client", "prometheus", "prometheus-client"),
        ("opentelemetry", "opentelemetry", "otel", "opentelemetry-api"),
    ],
)
def test_counts_work_and_the_error_names_the_extra(module: str, missing: str, extra: str, package: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from warmprefix import ContextPlanner, MissingExtraError
planner = ContextPlanner()
planner.commit(planner.plan(["a", "b"]))
assert planner.stats().commits == planner.stats().plan_latency.total == 1
try:
    import warmprefix_telemetry.{module}
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{MissingExtraError(extra, package)}\n"
