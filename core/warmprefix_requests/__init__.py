"""Request bodies of the APIs: how they are read, what is changed in them on their way out, and what answers report.

`outgoing` has the request and the processors that change it, `refusals` remembers what endpoints refuse. `transcript`
and `repeats` replace repeated results of tools by references, `memories` writes what changed in memories. `tool_lists`
keeps the order of tools, `forking` begins sub-agents, `marks` sets cache marks, `usage` reads token counts.
"""

from warmprefix_requests.block_places import block_ends, holds_blocks
from warmprefix_requests.echoes import Echoes, EchoStream, TextForm
from warmprefix_requests.forking import fork
from warmprefix_requests.memories import Memory, MemoryNotes, memories_of
from warmprefix_requests.outgoing import (
    OutgoingRequest,
    Processor,
    prepared,
    read_call,
    with_marks,
    with_references,
    with_salt,
    with_texts,
    with_token_ids,
    with_tools,
    with_tools_behind,
    with_usage,
)
from warmprefix_requests.prompts import RewriteRoute
from warmprefix_requests.refusals import Attempt, FieldRefusals
from warmprefix_requests.repeats import Rewritten, restored, rewrite
from warmprefix_requests.stored_history import StoredHistory
from warmprefix_requests.tool_lists import SentTools, SteadyMode, SteadyTools, ToolOrders, steady_tools
from warmprefix_requests.transcript import Transcript

__all__ = [
    "Attempt",
    "EchoStream",
    "Echoes",
    "FieldRefusals",
    "Memory",
    "MemoryNotes",
    "OutgoingRequest",
    "Processor",
    "RewriteRoute",
    "Rewritten",
    "SentTools",
    "SteadyMode",
    "SteadyTools",
    "StoredHistory",
    "TextForm",
    "ToolOrders",
    "Transcript",
    "block_ends",
    "fork",
    "holds_blocks",
    "memories_of",
    "prepared",
    "read_call",
    "restored",
    "rewrite",
    "steady_tools",
    "with_marks",
    "with_references",
    "with_salt",
    "with_texts",
    "with_token_ids",
    "with_tools",
    "with_tools_behind",
    "with_usage",
]
