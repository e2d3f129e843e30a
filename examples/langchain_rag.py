"""A RAG chain whose prompts begin with what the engine has cached. Needs langchain-classic and langchain-openai.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import inspect
import json
import os

from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from warmprefix import ContextPlanner
from warmprefix_langchain import ContextReuseRetriever, context_prompt

FUNCTIONS = {name: value for name, value in vars(json).items() if inspect.isfunction(value)}
PASSAGES = [Document(inspect.getdoc(value) or "", id=f"json.{name}") for name, value in FUNCTIONS.items()]
QUESTIONS = ["How do I read a file?", "How do I write a file?", "How do I read a str or a file?"]


def search(question: str) -> list[Document]:
    """Stand in for your own retriever: the passages that share the most words with the question."""
    words = set(question.lower().split())
    return sorted(PASSAGES, key=lambda passage: -len(words & set(passage.page_content.lower().split())))


planner = ContextPlanner()  # one for the whole application
retriever = ContextReuseRetriever(retriever=RunnableLambda(search), planner=planner, annotate="auto")  # one line
model = ChatOpenAI(model=os.environ["MODEL"])
chain = create_retrieval_chain(retriever, create_stuff_documents_chain(model, context_prompt()))
for question in QUESTIONS:
    found = chain.invoke({"input": question}, {"configurable": {"thread_id": "chat-1"}})["context"]
    print(question, [document.id for document in found])
print(planner.stats().reordered_plans, "of", len(QUESTIONS), "prompts were reordered")
