"""The command: `python -m examples.multi_agent_reader FOLDER QUESTION...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from warmprefix_chain_of_agents import ChainAnswer, ChainOfAgentsError

from .documents import read_documents
from .team import emulated_engines, open_team


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the questions, print answers and reports, and return the exit status."""
    parser = argparse.ArgumentParser(prog="multi_agent_reader", description="Let several agents read documents.")
    parser.add_argument("folder", type=Path, help="folder with .md, .rst and .txt files")
    parser.add_argument("questions", nargs="+", metavar="question")
    parser.add_argument("--agents", type=int, default=4, help="number of emulated engines if ENGINES is not set")
    options = parser.parse_args(arguments)
    try:
        documents = read_documents(options.folder)
    except ValueError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        engines = os.environ.get("ENGINES", "").split() or stack.enter_context(emulated_engines(options.agents))
        model = os.environ.get("MODEL", "warmprefix-emulator")
        team = stack.enter_context(open_team(engines, model, os.environ.get("OPENAI_API_KEY", "none")))
        for question in options.questions:
            try:
                answer = team.run(question, documents)
            except ChainOfAgentsError as error:
                print(error, file=sys.stderr)
                return 1
            print(f"{question}\n{answer.text}\n\n{report(answer)}\n")
    return 0


def report(answer: ChainAnswer) -> str:
    """Return a line per agent: its prompt tokens, those that its engine had cached, and the documents it read."""
    lines = []
    for agent, usage in answer.usage_by_agent.items():
        reports = [report for report in answer.workers if report.agent == agent and report.error is None]
        read = ", ".join(str(block.id) for report in reports for block in report.blocks)
        cached, total = usage.cached_tokens or 0, usage.prompt_tokens or 0
        lines.append(f"{agent}: {cached:,} of {total:,} prompt tokens were cached; read {read or 'no document'}")
    if answer.skipped:
        lines.append(f"not read: {', '.join(str(block.id) for block in answer.skipped)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
