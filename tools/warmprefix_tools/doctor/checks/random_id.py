"""UUIDs and other names for a request, in the prompt."""

from __future__ import annotations

import re

from warmprefix_tools.doctor.checks.base import TextCheck

__all__ = ["CHECK", "mask_ids"]

_ID = re.compile(
    r"""(?<![\w-])(?:
    [0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}
    | (?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}
    | (?=[0-9A-F]*[A-F])(?=[0-9A-F]*\d)[0-9A-F]{12,}
    | (?=[A-Za-z0-9_-]*\d[A-Za-z0-9_-]*\d)(?=[A-Za-z0-9_-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*(?<=[\w-]{16})
    | (?i:req|request|sess|session|trace|span|run|call|chatcmpl|conv|conversation|thread|msg|job|task)
      [-_:\#](?=[A-Za-z-]*\d)[A-Za-z0-9-]{4,}
    | \d{6,}
    )(?![\w-])""",
    re.VERBOSE,
)
_HINT = re.compile(r"\d[\w-]{4}|[\w-]{4}\d")


def mask_ids(segment: str) -> str:
    """The segment with a placeholder for each id.

    >>> mask_ids("Session 123e4567-e89b-12d3-a456-426614174000, request req-81f9c2.")
    'Session <id>, request <id>.'
    """
    return _ID.sub("<id>", segment) if _HINT.search(segment) else segment


CHECK = TextCheck(
    "random-id",
    "A random id stands in front of text that requests share",
    "Leave the id out: the model has no use for it. What you need for tracing belongs in metadata or a header; what the"
    " model must repeat, at the end of the prompt.",
    mask_ids,
    "everywhere",
)
