"""Agents read the standard library's documentation, each agent the passages that its engine holds. Needs openai.

ENGINES names the agents' engines, as base URLs with spaces in between, MODEL their model, OPENAI_API_KEY their key.
"""

import inspect
import os
import shutil
from contextlib import ExitStack

from openai import OpenAI

from warmprefix import ContextBlock
from warmprefix_chain_of_agents import ChainOfAgents, Manager, Worker

FUNCTIONS = {name: value for name, value in vars(shutil).items() if inspect.isfunction(value)}
DOCUMENTS = [ContextBlock(inspect.getdoc(value) or "", id=f"shutil.{name}") for name, value in FUNCTIONS.items()]
QUESTIONS = ["How do I copy a file?", "How do I copy a file with its metadata?", "How do I move a file?"]


def search(question: str) -> list[ContextBlock]:
    """Stand in for your own retriever: the six passages that share the most words with the question."""
    words = set(question.lower().strip("?").split())
    return sorted(DOCUMENTS, key=lambda document: -len(words & set(document.text.lower().split())))[:6]


with ExitStack() as stack:
    model = os.environ["MODEL"]
    clients = [stack.enter_context(OpenAI(base_url=url)) for url in os.environ["ENGINES"].split()]
    workers = [Worker(f"reader {number}", client, model) for number, client in enumerate(clients, start=1)]
    chain = ChainOfAgents(workers, Manager(clients[0], model), mode="map")
    for question in QUESTIONS:
        answer = chain.run(question, search(question))
        print(question, answer.text)
        for report in answer.workers:
            labels = " ".join(f"[{block.id}]" for block in report.blocks)
            print(f"  {report.agent}: {labels}, {report.usage.cached_tokens} of {report.usage.prompt_tokens} cached")
