"""A conversation that goes on at another worker, and is sent no passage twice. Needs redis, and a server.

WARMPREFIX_REDIS_URL names the server, such as redis://localhost:6379.
"""

import inspect
import json

from warmprefix import ContextBlock, ContextPlanner

FUNCTIONS = {name: value for name, value in vars(json).items() if inspect.isfunction(value)}
PASSAGES = [ContextBlock(inspect.getdoc(value) or "", id=f"json.{name}") for name, value in FUNCTIONS.items()]
QUESTIONS = ["How do I serialize to a file?", "And to a str?", "How do I deserialize a str?"]


def search(question: str) -> list[ContextBlock]:
    """Stand in for your own retriever: the two passages that share the most words with the question."""
    words = set(question.lower().strip("?").split()) - {"a", "to"}
    return sorted(PASSAGES, key=lambda passage: -len(words & set(passage.text.lower().split())))[:2]


def main() -> None:
    """Ask two workers in turn, as a load balancer does. In production each is a process of its own."""
    with ContextPlanner.from_url() as one, ContextPlanner.from_url() as other:
        messages: list[dict[str, str]] = []  # each worker gets them, from the browser or a database
        for worker, question in zip((one, other, one), QUESTIONS, strict=True):
            with worker.planning(search(question), conversation="chat-1", placement="tail", tenant="acme") as plan:
                messages.append({"role": "user", "content": f"{plan.render()}\n\n{question}"})
                messages.append({"role": "assistant", "content": "(here your model answers)"})
            print(question, *(block.text.partition("\n")[0] for block in plan.blocks), sep="\n  ")
        one.forget("chat-1", tenant="acme")  # its history ends here, so the next run starts a new one


main()
