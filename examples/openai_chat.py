"""Questions whose prompts begin with what the engine has cached, and what it reports. Needs openai.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import inspect
import json
import os

from openai import OpenAI

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink, messages_for

FUNCTIONS = {name: value for name, value in vars(json).items() if inspect.isfunction(value)}
PASSAGES = [ContextBlock(inspect.getdoc(value) or "", id=f"json.{name}") for name, value in FUNCTIONS.items()]
QUESTIONS = ["How do I read a file?", "How do I write a file?", "How do I read a str or a file?"]


def search(question: str) -> list[ContextBlock]:
    """Stand in for your own retriever: the passages that share the most words with the question."""
    words = set(question.lower().split())
    return sorted(PASSAGES, key=lambda passage: -len(words & set(passage.text.lower().split())))


planner = ContextPlanner()
link = EngineLink(planner)  # commits each plan when its answer has been read, or abandons it on failure
with OpenAI(http_client=link.http_client()) as client:
    for question in QUESTIONS:
        plan = planner.plan(search(question), tenant="acme", preamble="Be brief.")
        messages = messages_for(plan, question, preamble="Be brief.")
        with link.sending(plan):
            stream = client.chat.completions.create(model=os.environ["MODEL"], messages=messages, stream=True)
            print(question, "".join(chunk.choices[0].delta.content or "" for chunk in stream))
stats = planner.stats()
print(stats.reported_cached_tokens, "tokens were cached, wrong by", round(stats.prediction_error_mean), "on average")
