"""The capacity and the profile of an engine's cache, from its metrics."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from math import prod

from warmprefix.cache_profiles import PROFILES, CacheProfile, vllm_checkpoints
from warmprefix.errors import EngineError
from warmprefix.residency import EngineReport

__all__ = ["capacity_from_metrics", "report_from_metrics"]

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VLLM = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_SGLANG = re.compile(r"^sglang:max_total_num_tokens(?:\{.*\})? (\S+)", re.MULTILINE)
_MAX_BYTES = 64 << 20


def capacity_from_metrics(source: str, *, timeout: float = 5.0) -> int:
    """Return the number of tokens that the KV cache of an engine holds.

    Pass it as `capacity_tokens` to a `ContextPlanner`, which otherwise learns it.

    >>> capacity_from_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1.0')
    32768

    Args:
        source: The engine's address, such as `http://localhost:8000` (with or without `/v1`), to read its Prometheus
            metrics; or the text of these.
        timeout: Seconds to wait for them.

    Returns:
        vLLM's `kv_cache_size_tokens`, or its `block_size` times `num_gpu_blocks` without that; or SGLang's
        `max_total_num_tokens`. Of several engines or data-parallel ranks, the smallest value: one of them caches a
        prompt.

    Raises:
        EngineError: The engine could not be reached, or its metrics lack these values.
        ValueError: `source` is an address that is not `http` or `https`.
    """
    tokens = _capacity(_text(source, timeout))
    if tokens is None:
        raise EngineError("the metrics lack both vllm:cache_config_info with its sizes and sglang:max_total_num_tokens")
    return tokens


def report_from_metrics(source: str, *, timeout: float = 5.0) -> EngineReport:
    """Return the capacity of an engine's cache, and its profile if the engine keeps checkpoints or evicts by priority.

    vLLM's metrics show it for recurrent layers; for sliding windows they do not. SGLang shows both in its
    `/server_info`, also if it has no metrics.

    >>> text = 'vllm:cache_config_info{block_size="528",mamba_cache_mode="align",num_gpu_blocks="None"} 1.0'
    >>> report_from_metrics(text).profile.name
    'vllm-checkpoints(528)'

    Args:
        source: As in `capacity_from_metrics`.
        timeout: Seconds to wait for the metrics.

    Raises:
        EngineError: The engine could not be reached.
        ValueError: `source` is an address that is not `http` or `https`.
    """
    try:
        text = _text(source, timeout)
    except EngineError:
        if (report := _report_from_info(source, timeout)) is not None:
            return report
        raise
    if _SGLANG.search(text) is not None and (report := _report_from_info(source, timeout)) is not None:
        return report
    profile: CacheProfile | None = None
    for labels in _VLLM.findall(text):
        values = dict(_LABEL.findall(labels))
        block = values.get("block_size", "")
        if values.get("mamba_cache_mode") == "align" and block.isascii() and block.isdigit() and int(block):
            profile = vllm_checkpoints(int(block))
    return EngineReport(capacity_tokens=_capacity(text), profile=profile)


def _report_from_info(address: str, timeout: float) -> EngineReport | None:
    """Return what SGLang's `/server_info` shows; None if there is none at the address."""
    if not _is_address(address):
        return None
    try:
        info = json.loads(_text(address, timeout, "/server_info"))
    except (EngineError, ValueError, RecursionError):
        return None
    if not isinstance(info, dict) or "radix_eviction_policy" not in info:
        return None
    evicts_by_priority = info["radix_eviction_policy"] == "priority" and info.get("enable_priority_scheduling") is False
    # With priority scheduling the same number decides which request runs next, and which is interrupted.
    if info.get("abort_on_priority_when_disabled"):  # an answer in pieces would begin, and then fail
        evicts_by_priority = False
    tokens = info.get("max_total_num_tokens")
    return EngineReport(
        capacity_tokens=tokens if type(tokens) is int and tokens > 0 else None,
        profile=PROFILES["priority-eviction"] if evicts_by_priority else None,
    )


def _capacity(text: str) -> int | None:
    found = [float(value) for value in _SGLANG.findall(text)]
    for labels in _VLLM.findall(text):
        values = dict(_LABEL.findall(labels))
        for names in (("kv_cache_size_tokens",), ("block_size", "num_gpu_blocks")):
            with suppress(KeyError, ValueError):  # a version lacks it, or "None" before the cache was allocated
                found.append(prod([int(values[name]) for name in names]))
                break
    return min([int(value) for value in found if value >= 1], default=None)


def _is_address(source: str) -> bool:
    return "://" in source and "\n" not in source


def _text(address: str, timeout: float, path: str = "/metrics") -> str:
    """Return the text at a path of an address, or the argument itself if it is the text."""
    if not _is_address(address):
        return address
    import http.client  # slow imports, for a function that is called once
    import urllib.request

    if not address.startswith(("http://", "https://")):
        raise ValueError(f"source must be an http or https address, or the text of metrics, got {address!r}")
    url = f"{address.rstrip('/').removesuffix('/v1').removesuffix('/metrics')}{path}"
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - the scheme was checked
            body: bytes = answer.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url} could not be read: {error}") from error
    return body.decode("utf-8", "replace")
