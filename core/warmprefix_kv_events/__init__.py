"""What an engine holds, by its KV events: decoded, put in order, applied to an index, and reported as context blocks.

`kv_events` decodes messages, `subscription` receives them without gaps, `kv_index` applies them, `prompt_tree` finds
the prompts that they concern, and `kv_feed` notifies the planner. `spans` finds context blocks in prompts, with the
engine's own tokenizer, which `background_counter` asks for the lengths of notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmprefix_kv_events.spans import EngineTokenizer, TokenizerError

if TYPE_CHECKING:
    from warmprefix_kv_events.kv_feed import FeedBounds, KvEventFeed

__all__ = ["EngineTokenizer", "FeedBounds", "KvEventFeed", "TokenizerError"]


def __getattr__(name: str) -> Any:
    """Import on first use what needs the extra `events`."""
    if name not in ("FeedBounds", "KvEventFeed"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from warmprefix_kv_events import kv_feed

    return getattr(kv_feed, name)
