"""The same calls give the same assignments in every process, whatever its hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import hashlib, random
from warmprefix import ContextBlock, EngineReport
from warmprefix_routing import Agent, AgentBounds, AgentRouter

rng = random.Random(1)
blocks = [ContextBlock(f"block {i}", tokens=rng.randrange(500)) for i in range(200)]
agents = [Agent(f"agent-{i}", 20_000, 1.0 + i % 2) for i in range(7)]
router = AgentRouter(agents, bounds=AgentBounds(free_tokens=1_000))
digest = hashlib.sha256()
for i in range(300):
    assignment = router.assign(
        rng.sample(blocks, rng.randrange(12)), conversation=f"chat {i % 5}", tenant=f"tenant {i % 2}",
        together=i % 3 == 0,
    )
    digest.update(repr([(each.block.text, *each[1:]) for each in assignment.blocks]).encode())
    if i % 11 == 4:
        router.fail("agent-3")
        assignment = router.reassign(assignment, "agent-3")
        digest.update(repr([each.agent for each in assignment.blocks]).encode())
        router.join("agent-3")
    elif i % 5 == 0:
        router.abandon(assignment)
    router.commit(assignment, report=EngineReport(cached_tokens=rng.randrange(300)))
print(digest.hexdigest(), router.stats(), sorted(router.load("tenant 1").items()))
"""


def test_assignments_do_not_depend_on_the_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert "spilled=0" not in next(iter(outputs))
