"""Settings that all tests share, and the two tiers of tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
import ssl
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

# Tests assert no durations, so Hypothesis does not either.
settings.register_profile("quick", deadline=None, max_examples=20, stateful_step_count=20)
settings.register_profile("all", deadline=None, max_examples=100, stateful_step_count=40)

# A shell that starts tests in the background, or with nohup, makes them ignore signals. Commands under test need those.
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects the second tier."""
    parser.addoption(
        "--all",
        action="store_true",
        help="run all tests: every Redis server found, tests marked `slow`, all variants of tests marked `sample`, "
        "and five times as many property examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a property gets."""
    os.environ.setdefault("MEM0_TELEMETRY", "False")  # read when mem0 is imported
    if not config.getoption("hypothesisprofile", None):
        settings.load_profile("all" if config.getoption("all") else "quick")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Show the tier, the Redis and Valkey binaries in use, and those that were found but do not work."""
    lines = [] if config.getoption("all") else ["quick tier: use --all for more servers, slow tests and more examples"]
    if find_spec("redis") is None:  # the environments of some frameworks
        return lines
    from redis_servers import describe_binaries

    return [*lines, *(f"Redis server: {line}" for line in describe_binaries())]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one worker more than there are processors: many tests wait for servers."""
    return (os.cpu_count() or 1) + 1


SECOND_TIER = (
    "integrations/ray",
    "tests/integrations/ray",
    "tests/docs_site/test_site.py",
    "tests/examples/test_notebook.py",
)
"""What needs packages that the first tier's environment does not have."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what the first tier cannot import."""
    place = (
        collection_path.relative_to(config.rootpath).as_posix() if config.rootpath in collection_path.parents else ""
    )
    return True if place in SECOND_TIER and not config.getoption("all") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give out files in the order of `pytest_collection_modifyitems`, and tests that share an engine to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _unit(nodeid: str) -> str:
    """Return what one worker runs: a file, or the folder whose tests share a server that starts slowly."""
    return "tests/engine" if nodeid.startswith("tests/engine/") else nodeid.partition("::")[0]


_SLOW = 30
"""What a test marked `slow` or `vllm` counts in the order of files, as others."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left alone with one; leave out the second tier by default."""
    sizes: Counter[str] = Counter()
    for item in items:
        is_slow = any(item.get_closest_marker(name) is not None for name in ("slow", "vllm"))
        sizes[_unit(item.nodeid)] += _SLOW if is_slow else 1
    items.sort(key=lambda item: -sizes[_unit(item.nodeid)])
    if config.getoption("all"):
        return
    older = _older_servers()
    left_out = {item for item in items if _is_second_tier(item, older)}
    left_out |= set(_unsampled(item for item in items if item not in left_out))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Exempt all modules from garbage collection, which tests start often."""
    gc.freeze()


def _is_second_tier(item: pytest.Item, older_servers: set[str]) -> bool:
    if item.get_closest_marker("slow") is not None:
        return True
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return any(isinstance(value, str) and value in older_servers for value in values)


def _unsampled(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the variants of tests marked `sample` that the first tier leaves out.

    It keeps variants at equal distances. The first one depends on the test's name, so that tests with the same
    parameters run with different ones.
    """
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            variants[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in variants.items():
        marker = of_test[0].get_closest_marker("sample")
        size = marker.args[0] if marker is not None else 0
        kept = {(crc32(name.encode()) + i * len(of_test) // size) % len(of_test) for i in range(size)}
        yield from (item for i, item in enumerate(of_test) if i not in kept)


def _older_servers() -> set[str]:
    """Return the flavours of all servers found but the newest, which the first tier uses."""
    if find_spec("redis") is None:
        return set()
    from redis_servers import binaries

    return set(list(binaries(clock=True))[:-1])


@pytest.fixture(scope="session", autouse=True)
def _shared_certificates() -> Iterator[None]:
    """Let HTTP clients share the certificates they trust: each client reads them again, which takes 25 ms."""
    create = ssl.create_default_context
    shared = functools.cache(create)

    def create_default_context(*purpose: ssl.Purpose, **options: str | bytes | None) -> ssl.SSLContext:
        return shared(**options) if options.keys() == {"cafile"} and not purpose else create(*purpose, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create_default_context)
        yield
