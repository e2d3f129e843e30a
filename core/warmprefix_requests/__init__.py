"""De-duplication: text that the prompt already holds becomes a reference.

`history` compares a request's blocks with its conversation; `transcript` compares the tool results inside one prompt,
and `requests` does so in the bodies of requests.
"""

from warmprefix.history import Message, SdkMessage, VisibleHistory, as_mapping
from warmprefix_requests.echoes import EchoedText, Echoes, EchoStream, TextForm
from warmprefix_requests.prompts import PromptMessage, RewriteRoute, canonical_prompt
from warmprefix_requests.repeats import RepeatedResult, RewriteLevel, Rewritten, restored, rewrite
from warmprefix_requests.transcript import RepeatLevel, Transcript
from warmprefix_requests.wording import RepeatTemplates

__all__ = [
    "EchoStream",
    "EchoedText",
    "Echoes",
    "Message",
    "PromptMessage",
    "RepeatLevel",
    "RepeatTemplates",
    "RepeatedResult",
    "RewriteLevel",
    "RewriteRoute",
    "Rewritten",
    "SdkMessage",
    "TextForm",
    "Transcript",
    "VisibleHistory",
    "as_mapping",
    "canonical_prompt",
    "restored",
    "rewrite",
]
