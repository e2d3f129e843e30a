"""Settings that every test shares."""

from __future__ import annotations

import signal
from importlib.util import find_spec

from hypothesis import settings

# No test asserts a duration, so neither does Hypothesis.
settings.register_profile("warmprefix", deadline=None)
settings.load_profile("warmprefix")

# Who starts the tests in the background, or with nohup, has signals ignored that commands under test must heed.
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_report_header() -> list[str]:
    """Say which Redis and Valkey binaries the tests use, and which were found but do not work."""
    if find_spec("redis") is None:  # the environments of some frameworks
        return []
    from redis_servers import describe_binaries

    return [f"Redis server: {line}" for line in describe_binaries()]
