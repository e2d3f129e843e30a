"""A batch of questions, planned as a whole, then asked several at once. Needs openai; run it again to take it up.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import asyncio
import inspect
import json
import os

from openai import AsyncOpenAI

from warmprefix import BatchRequest, ContextBlock, ContextPlanner
from warmprefix_openai import BatchRunner

FUNCTIONS = {name: value for name, value in vars(json).items() if inspect.isfunction(value)}
PASSAGES = [ContextBlock(inspect.getdoc(value) or "", id=f"json.{name}") for name, value in FUNCTIONS.items()]
QUESTIONS = ["How do I indent the output?", "What is object_hook called with?", "Which separators are compact?"]


def search(question: str) -> list[ContextBlock]:
    """Stand in for your own retriever: the two passages that share the most words with the question."""
    words = set(question.lower().strip("?").split())
    return sorted(PASSAGES, key=lambda passage: -len(words & set(passage.text.lower().split())))[:2]


async def main() -> None:
    """Plan, and ask."""
    requests = [BatchRequest(i, search(question), question) for i, question in enumerate(QUESTIONS)]
    batch = ContextPlanner().plan_batch(requests)
    print(f"{batch.hit_ratio:.0%} of the context will be cached")
    async with AsyncOpenAI() as client:
        run = BatchRunner(batch).run(client, os.environ["MODEL"], journal="questions.journal", max_tokens=200)
        async for result in run:
            print(result.request.request.question, result.cached_tokens, result.error or result.text)


asyncio.run(main())
