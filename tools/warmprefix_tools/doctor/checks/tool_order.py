"""Tools in another order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from warmprefix_tools.doctor.checks.base import MessageCheck, Spot, SpotPair
from warmprefix_tools.doctor.prompts import TOOLS, Message

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["CHECK", "tools_of"]


def tools_of(survey: Survey, message: Message) -> list[Any]:
    """The tools that the message was made of."""
    tools: list[Any] = json.loads(survey.log.text(message))
    return tools


def _mend(survey: Survey, message: Message) -> Message:
    if message.role != TOOLS:
        return message
    texts = [json.dumps(tool) for tool in sorted(tools_of(survey, message), key=_name)]
    return survey.log.tools(texts)


def _name(tool: Any) -> str:
    return f"{tool_name(tool)}\n{json.dumps(tool, sort_keys=True)}"


def tool_name(tool: Any) -> str:
    """What the model calls it; empty for what is no tool."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
    one, other = (survey.tools_message(request) for request in (later, earlier))
    if one is None or other is None:
        return None
    names, others = ([tool_name(tool) for tool in tools_of(survey, message)] for message in (one, other))
    for at, (name, old) in enumerate(zip(names, others, strict=False)):
        if name != old:
            return _field(at, names), _field(at, others)
    return None


def _field(at: int, names: list[str]) -> Spot:
    return Spot(path=f"tools[{at}].function.name", text=", ".join(names[max(at - 2, 0) : at + 6]))


CHECK = MessageCheck(
    "tool-order",
    "The tools come in another order from request to request",
    "Sort the tools by name before every call. They stand at the very front of the prompt, so nothing behind them is"
    " shared when their order changes: collect them in a list, never in a set.",
    _mend,
    _spot,
)
