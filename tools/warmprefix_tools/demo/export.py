"""A run's numbers for other programs."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix_tools.demo.options import DemoOptions
from warmprefix_tools.demo.runner import Served
from warmprefix_tools.demo.session import DemoResult
from warmprefix_tools.demo.summary import summarize_arm, summarize_workload

__all__ = ["as_json"]


def as_json(result: DemoResult, options: DemoOptions) -> dict[str, Any]:
    """Options, workload, and for each placement both arms' totals and requests; nothing secret, no prompt's text."""
    return {
        "warmprefix": __version__,
        "python": platform.python_version(),
        "options": {
            "k": options.k,
            "questions": options.questions,
            "seed": options.seed,
            "concurrency": options.concurrency,
        },
        "engine": _engine(result, options),
        "workload": asdict(summarize_workload(result.turns)),
        "placements": {
            placement: {"relevance_order": _arm(relevance), "warmprefix": _arm(warmprefix)}
            for placement, (relevance, warmprefix) in result.runs.items()
        },
        "seconds": round(result.seconds, 3),
    }


def _engine(result: DemoResult, options: DemoOptions) -> dict[str, Any]:
    if result.emulator is None:
        return {"emulated": False, "endpoint": options.endpoint, "model": result.model}
    rate = result.emulator.prefill_rate
    return {
        "emulated": True,
        "kv_blocks": result.emulator.kv_blocks,
        "block_size": result.emulator.block_size,
        "base_ttft_ms": result.emulator.base_ttft_ms,
        "prefill_rate": rate if math.isfinite(rate) else None,
    }


def _arm(served: Sequence[Served]) -> dict[str, Any]:
    summary = summarize_arm(served)
    return {
        **asdict(summary),
        "hit_ratio": summary.hit_ratio,
        "prefilled_tokens": summary.prefilled_tokens,
        "per_request": [
            {
                "conversation": each.question.conversation,
                "turn": each.question.turn,
                "prompt_tokens": each.answer.prompt_tokens,
                "cached_tokens": each.answer.cached_tokens,
                "ttft": each.ttft,
                "planning": each.context.planning_seconds,
                "labels": [block.label for block in each.context.blocks],
                "references": [block.label for block in each.context.blocks if block.is_reference],
            }
            for each in served
        ],
    }
