"""OpenAI clients whose requests carry their plan: what the engine says of an answer comes back to the planner.

`messages_for` needs nothing; the clients that `EngineLink` makes need the extra `openai`, imported when they are made.
"""

from warmprefix.openai.link import EngineLink
from warmprefix.openai.marks import PLAN_HEADER
from warmprefix.openai.messages import messages_for
from warmprefix.openai.stats import LinkStats

__all__ = ["PLAN_HEADER", "EngineLink", "LinkStats", "messages_for"]
