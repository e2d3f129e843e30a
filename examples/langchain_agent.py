"""An agent that looks a passage up in two turns and is sent it once. Needs langchain-openai.

OPENAI_BASE_URL names the engine, MODEL its model, OPENAI_API_KEY its key (anything, if it wants none).
"""

import inspect
import json
import os

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from warmprefix_langchain import ContextReuseMiddleware

QUESTIONS = ["Look json.dumps up. How do I sort the keys?", "Look json.dumps up again. How do I indent?"]


@tool
def documentation(function: str) -> str:
    """Look up a function of Python's json module: dump, dumps, load or loads."""
    return inspect.getdoc(getattr(json, function, None)) or "There is no such function."


reuse = ContextReuseMiddleware()  # the last in `middleware`, nearest to the model
model = ChatOpenAI(model=os.environ["MODEL"])
agent = create_agent(model, [documentation], middleware=[reuse], checkpointer=InMemorySaver())
thread: RunnableConfig = {"configurable": {"thread_id": "chat-1"}}
for question in QUESTIONS:
    state = agent.invoke({"messages": [HumanMessage(question)]}, thread)
    print(question, state["messages"][-1].content)
print(reuse.stats().reference_tokens, "tokens were spared")
