"""Mode "chain": each worker is given what the one before handed on (Zhang et al. 2024, Algorithm 1)."""

from __future__ import annotations

from typing import Any

QUESTION = "Which fact is worth a mention?"


def script_units(team: Any) -> None:
    for name, engine in team.workers.items():
        engine.script({"role": "assistant", "content": f"The unit of {name}."})


def test_units_go_from_worker_to_worker_and_the_last_to_the_manager(
    start_team: Any, documents: Any, shown: Any
) -> None:
    team, given = start_team(), documents(6)
    script_units(team)
    answer = team.chain.run(QUESTION, given)
    assert len(answer.workers) == 3
    before = None
    for report in answer.workers:
        [body] = team.engines[report.agent].bodies
        asked = body["messages"][-1]["content"]
        assert report.text == f"The unit of {report.agent}."
        assert sorted(shown(body, given)) == sorted(block.id for block in report.blocks)
        parts = [asked.index(block.text) for block in report.blocks]
        if before is None:
            assert "Here is the summary" not in asked
        else:
            parts.append(asked.index(f"Here is the summary of the previous source text: {before}\n\n"))
        parts.append(asked.index(f"Question: {QUESTION}\n\nYou need to read current source text"))
        assert parts[-2] < parts[-1]
        assert max(parts[: len(report.blocks)]) < min(parts[len(report.blocks) :])
        before = report.text
    asked = team.engines["manager"].bodies[0]["messages"][-1]["content"]
    assert f"You need to answer based on the summary: {before}\n\nQuestion: {QUESTION}\n\nAnswer:" in asked
    assert "Summary 1" not in asked


def test_the_most_relevant_document_is_read_first(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(6)
    answer = team.chain.run(QUESTION, given)
    firsts = [given.index(report.blocks[0]) for report in answer.workers]
    assert firsts == sorted(firsts)


def test_fewer_documents_than_workers(start_team: Any, documents: Any) -> None:
    team = start_team(workers=5)
    answer = team.chain.run(QUESTION, documents(2))
    assert 1 <= len(answer.workers) <= 2
    assert sum(len(engine.bodies) for engine in team.workers.values()) == len(answer.workers)


def test_one_document_a_step(start_team: Any, documents: Any) -> None:
    team, given = start_team(together=False), documents(5)
    answer = team.chain.run(QUESTION, given)
    assert [report.blocks for report in answer.workers] == [(block,) for block in given]
    asked = [body["messages"][-1]["content"] for bodies in team.bodies().values() for body in bodies]
    assert sum("Here is the summary of the previous source text: " in text for text in asked) == 4


def test_the_worker_that_replaces_a_dead_one_is_next(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(6)
    script_units(team)
    first = team.chain.run(QUESTION, given)
    team.kill(first.workers[1].agent)
    for name, engine in team.workers.items():
        if name != first.workers[1].agent:
            engine.script(*({"role": "assistant", "content": f"Unit {n} of {name}."} for n in range(3)))
    answer = team.chain.run("And what else?", given)
    failed = [report for report in answer.workers if report.error is not None]
    assert [report.agent for report in failed] == [first.workers[1].agent]
    place = answer.workers.index(failed[0])
    read = {block.id for report in answer.workers[place + 1 :] for block in report.blocks}
    assert {block.id for block in failed[0].blocks} <= read
    assert answer.skipped == ()
    units = [report.text for report in answer.workers if report.text is not None]
    assert f"summary: {units[-1]}" in team.engines["manager"].prompts[-1]
    prompts = "\n".join(prompt for engine in team.workers.values() for prompt in engine.prompts)
    assert all(f"Here is the summary of the previous source text: {unit}\n\n" in prompts for unit in units[:-1])


def test_no_prompt_is_longer_than_a_window(start_team: Any, documents: Any, shown: Any) -> None:
    team, given = start_team(max_chat_tokens=400), documents(24)
    answer = team.chain.run(QUESTION, given)
    bodies = [body for bodies in team.bodies().values() for body in bodies if shown(body, given)]
    assert len(bodies) == len(answer.workers) > 3
    assert sorted(id for body in bodies for id in shown(body, given)) == sorted(block.id for block in given)
    assert max(sum(block.tokens for block in report.blocks) for report in answer.workers) <= 300
