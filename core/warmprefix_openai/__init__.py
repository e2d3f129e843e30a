"""OpenAI clients whose requests carry their plan, batches that run against an engine, and the calls of both.

`messages_for` and `Retries` need nothing. Sending requests needs the extra `openai`, imported with the first of them.
"""

from typing import TYPE_CHECKING, Any

from warmprefix_openai.answer import AnswerFacts, EventSplitter, StreamedAnswer, WholeAnswer, event_data, is_stream
from warmprefix_openai.batch_runner.journal import BatchResult
from warmprefix_openai.batch_runner.runner import BatchRunner
from warmprefix_openai.completion import AnswerError, BrokenStreamError, ChatAnswer, chat_options
from warmprefix_openai.link import EngineLink
from warmprefix_openai.messages import messages_for
from warmprefix_openai.plans import PLAN_HEADER
from warmprefix_openai.primer import PrimeStats, cut_chat
from warmprefix_openai.retry import Retries, may_pass, status_of
from warmprefix_openai.tracker import LinkStats

if TYPE_CHECKING:
    from warmprefix_openai.asking import CallFailedError, ChatAsker, SlowAnswerError, ask_with_retries

__all__ = [
    "PLAN_HEADER",
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
    "Retries",
    "SlowAnswerError",
    "StreamedAnswer",
    "WholeAnswer",
    "ask_with_retries",
    "chat_options",
    "cut_chat",
    "event_data",
    "is_stream",
    "may_pass",
    "messages_for",
    "status_of",
]


def __getattr__(name: str) -> Any:
    """Import the names that need the extra `openai` when they are first used."""
    if name not in ("CallFailedError", "ChatAsker", "SlowAnswerError", "ask_with_retries"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from warmprefix_openai import asking

    return getattr(asking, name)
