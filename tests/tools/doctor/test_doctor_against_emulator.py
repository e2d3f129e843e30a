"""Hits and costs in the doctor's reports, against the emulator's own prefix cache on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmprefix_tools.doctor.findings import DoctorReport
from warmprefix_tools.emulator import PrefixCache, render_chat
from warmprefix_tools.emulator.openai_bodies import ChatCompletionRequest

Examine = Callable[[Any], DoctorReport]

DEFECTS = [
    *[("rag", defect) for defect in ("timestamp", "random-id", "user-text", "whitespace", "unicode", "salt-split")],
    *[("rag", defect) for defect in ("variable-prefix", "position-number", "passage-scores", "passage-order")],
    *[("agent", defect) for defect in ("timestamp", "tool-order", "json-key-order", "user-text", "variable-prefix")],
    *[("chat", defect) for defect in ("user-text", "unicode", "history-truncated", "history-rewritten")],
    *[("memory", defect) for defect in ("random-id", "salt-split", "memory-reranked")],
]


def emulated(bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the prompt tokens, and those of them that the emulator had cached, one request after another."""
    prompts = [render_chat(ChatCompletionRequest.model_validate(body).for_template()) for body in bodies]
    cache = PrefixCache(sum(map(len, prompts)) // 16 + len(prompts) + 1)
    prompt_tokens = cached_tokens = 0
    for body, prompt in zip(bodies, prompts, strict=True):
        sequence = cache.allocate(prompt, body.get("cache_salt"))
        assert sequence is not None
        cache.store(sequence)
        cache.free(sequence)
        prompt_tokens += len(prompt)
        cached_tokens += sequence.cached_tokens
    return prompt_tokens, cached_tokens


SEEDS = (3, 4)
UNDERCHARGED = pytest.mark.xfail(reason="only blank lines separate passages without labels", strict=False)
"""Seed 3 makes such a log, and its passage order is charged too little, as docs/doctor.md explains."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "defect"), DEFECTS)
def test_hits_are_the_emulators(
    make_log: Callable[..., Any], examine: Examine, kind: str, defect: str, seed: int
) -> None:
    for made in (make_log(kind, seed, defect), make_log(kind, seed)):
        report = examine(made)
        assert (report.prompt_tokens, report.hit_tokens) == emulated(made.bodies)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "defect", "seed"),
    [
        pytest.param(*case, seed, marks=UNDERCHARGED if (case[1], seed) == ("passage-order", 3) else ())
        for case in DEFECTS
        for seed in SEEDS
    ],
)
def test_cost_of_a_finding_is_the_emulators_gain_without_the_defect(
    make_log: Callable[..., Any], examine: Examine, kind: str, defect: str, seed: int
) -> None:
    defective, clean = make_log(kind, seed, defect), make_log(kind, seed)
    before, after = (prompt - cached for prompt, cached in map(emulated, (defective.bodies, clean.bodies)))
    (finding,) = examine(defective).findings
    assert finding.lost_tokens == pytest.approx(before - after, rel=0.15)
