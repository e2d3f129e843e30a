"""How much an engine's prefix cache holds, by its own account."""

from __future__ import annotations

import re

from warmprefix.errors import EngineError

__all__ = ["capacity_from_metrics"]

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VLLM = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_SGLANG = re.compile(r"^sglang:max_total_num_tokens(?:\{.*\})? (\S+)", re.MULTILINE)
_MOST_BYTES = 64 << 20


def capacity_from_metrics(source: str, *, timeout: float = 5.0) -> int:
    """Tokens that the KV cache of an engine holds: `capacity_tokens` for a `ContextPlanner`.

    >>> capacity_from_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="2048"} 1.0')
    32768

    Args:
        source: The engine's address, such as `http://localhost:8000` (with or without `/v1`), which is asked for its
            Prometheus metrics; or the text of these.
        timeout: Seconds to wait for them.

    Returns:
        What vLLM calls `block_size` times `num_gpu_blocks`, or SGLang `max_total_num_tokens`. If there are several
        engines or data-parallel ranks, that of the smallest: a prompt is cached by one of them.

    Raises:
        EngineError: The engine could not be asked, or does not tell.
        ValueError: `source` is an address that is not `http` or `https`.
    """
    text = _metrics(source, timeout) if "://" in source and "\n" not in source else source
    found = [float(value) for value in _SGLANG.findall(text)]
    for labels in _VLLM.findall(text):
        told = dict(_LABEL.findall(labels))
        try:
            found.append(int(told["block_size"]) * int(told["num_gpu_blocks"]))
        except (KeyError, ValueError):  # "None", before the cache was made
            continue
    tokens = [int(value) for value in found if value >= 1]
    if not tokens:
        raise EngineError("the metrics lack both vllm:cache_config_info with its sizes and sglang:max_total_num_tokens")
    return min(tokens)


def _metrics(address: str, timeout: float) -> str:
    import http.client  # these take long to import, for who calls this once
    import urllib.request

    if not address.startswith(("http://", "https://")):
        raise ValueError(f"source must be an http or https address, or the text of metrics, got {address!r}")
    url = f"{address.rstrip('/').removesuffix('/v1').removesuffix('/metrics')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - the scheme was looked at
            body: bytes = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url} could not be read: {error}") from error
    return body.decode("utf-8", "replace")
