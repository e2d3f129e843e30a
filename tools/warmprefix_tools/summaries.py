"""Summaries of the commands, which `--help` shows even without the extra `cli`."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SUMMARIES"]

SUMMARIES: Mapping[str, str] = {
    "emulate": "Serve an engine that has vLLM's prefix cache and no model, to develop against without a GPU.",
    "serve": "Serve a gateway in front of your engines: only the base URL of your applications changes.",
    "demo": "Show, on real text, how much prefill warmprefix saves. Takes about a minute.",
    "record": "Run an application, and write what its planners are asked to plan as a trace for `warmprefix replay`.",
    "replay": "Show what warmprefix would save on recorded retrieval traces, by policy and cache size.",
    "plan-batch": "Plan a recorded trace as one batch: the order of blocks in every request, and of the requests.",
    "doctor": "Find what keeps the prefix cache cold in logged chat requests, worst first, and how to fix it.",
    "quality": "Compare a model's answers with and without what warmprefix changes in its prompts.",
    "quality run": "Ask a model the same questions, with the evidence arranged in different ways. Can be stopped.",
    "quality judge": "Ask a second model which of two answers is better, in both orders.",
    "quality report": "Show how the answers differ, with intervals. Status 1 if an arm of --check may be worse.",
    "quality compare": "Show how the answers of two runs differ, of two models for example.",
    "state": "Look into the state that planners share in Redis, and forget a conversation.",
    "state inspect": "Show the stored state of a conversation. Status 1 if nothing is stored.",
    "state forget": "Forget a conversation, so that its blocks are sent in full. Status 1 if nothing is stored.",
    "state stats": "Show the servers, and how much lies there; beyond 200,000 keys, estimated.",
}
"""By name of the command, in the order of `--help`."""
