"""OpenAI clients whose requests carry their plan, batches that run against an engine, and the calls of both.

`messages_for` and `Retries` need nothing. Sending requests needs the extra `openai`, imported with the first of them.
"""

from typing import TYPE_CHECKING, Any

from warmprefix.openai.answer import (
    AnswerFacts,
    EventSplitter,
    StreamedAnswer,
    WholeAnswer,
    event_data,
    is_stream,
)
from warmprefix.openai.batch_runner import BatchResult, BatchRunner
from warmprefix.openai.call import Additions, PromptCall, chat_options, completed, read_call
from warmprefix.openai.completion import AnswerError, BrokenStreamError, ChatAnswer
from warmprefix.openai.link import EngineLink
from warmprefix.openai.messages import messages_for
from warmprefix.openai.plans import PLAN_HEADER
from warmprefix.openai.prime_stats import PrimeStats
from warmprefix.openai.retry import Retries, may_pass, status_of
from warmprefix.openai.tracker import LinkStats

if TYPE_CHECKING:
    from warmprefix.openai.asking import CallFailedError, ChatAsker, SlowAnswerError, ask_with_retries

__all__ = [
    "PLAN_HEADER",
    "Additions",
    "AnswerError",
    "AnswerFacts",
    "BatchResult",
    "BatchRunner",
    "BrokenStreamError",
    "CallFailedError",
    "ChatAnswer",
    "ChatAsker",
    "EngineLink",
    "EventSplitter",
    "LinkStats",
    "PrimeStats",
    "PromptCall",
    "Retries",
    "SlowAnswerError",
    "StreamedAnswer",
    "WholeAnswer",
    "ask_with_retries",
    "chat_options",
    "completed",
    "event_data",
    "is_stream",
    "may_pass",
    "messages_for",
    "read_call",
    "status_of",
]


def __getattr__(name: str) -> Any:
    """Import the names that need the extra `openai` when they are first used."""
    if name not in ("CallFailedError", "ChatAsker", "SlowAnswerError", "ask_with_retries"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from warmprefix.openai import asking

    return getattr(asking, name)
