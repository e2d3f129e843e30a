"""What the doctor counts, against the emulator's own prefix cache on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmprefix.doctor.report import Report
from warmprefix.emulator import PrefixCache, render_chat
from warmprefix.emulator.protocol import ChatCompletionRequest

Examine = Callable[[Any], Report]

DEFECTS = [
    *[("rag", defect) for defect in ("timestamp", "random-id", "user-text", "whitespace", "unicode", "salt-split")],
    *[("rag", defect) for defect in ("variable-prefix", "position-number", "passage-scores", "passage-order")],
    *[("agent", defect) for defect in ("timestamp", "tool-order", "json-key-order", "user-text", "variable-prefix")],
    *[("chat", defect) for defect in ("user-text", "unicode", "history-truncated", "history-rewritten")],
    *[("memory", defect) for defect in ("random-id", "salt-split", "memory-reranked")],
]


def emulated(bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Prompt tokens, and those of them that the emulator had cached, one request after another."""
    cache = PrefixCache(100_000)
    prompt_tokens = cached_tokens = 0
    for body in bodies:
        prompt = render_chat(ChatCompletionRequest.model_validate(body).for_template())
        sequence = cache.allocate(prompt, body.get("cache_salt"))
        assert sequence is not None
        cache.store(sequence)
        cache.free(sequence)
        prompt_tokens += len(prompt)
        cached_tokens += sequence.cached_tokens
    return prompt_tokens, cached_tokens


@pytest.mark.parametrize(("kind", "defect"), DEFECTS)
def test_hits_are_the_emulators_and_so_is_what_mending_gains(
    make_log: Callable[..., Any], examine: Examine, kind: str, defect: str
) -> None:
    ill, well = make_log(kind, 4, defect), make_log(kind, 4)
    report = examine(ill)
    assert (report.prompt_tokens, report.hit_tokens) == emulated(ill.bodies)
    clean = examine(well)
    assert (clean.prompt_tokens, clean.hit_tokens) == emulated(well.bodies)
    (finding,) = report.findings
    prefilled_ill = report.prompt_tokens - report.hit_tokens
    prefilled_well = clean.prompt_tokens - clean.hit_tokens
    assert finding.lost_tokens == pytest.approx(prefilled_ill - prefilled_well, rel=0.15)
