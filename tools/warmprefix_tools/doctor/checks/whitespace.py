"""The same text with other blanks and line ends."""

from __future__ import annotations

import re

from warmprefix_tools.doctor.checks.base import TextCheck

__all__ = ["CHECK", "plain_space"]

_RUN = re.compile(r"[ \t\r\n\f\v]+")
_ODD = re.compile(r"[\t\r\f\v]|  |\n[ \n]|[ \n]\Z")


def plain_space(segment: str) -> str:
    r"""The segment with one blank, or one line feed, for each run of white space, and none at its end.

    >>> plain_space("\r\n\n  Rules:\t none "), plain_space("\n\n")
    ('\n Rules: none', '')
    """
    if not _ODD.search(segment):
        return segment
    return _RUN.sub(_plain, segment).rstrip(" \n")


def _plain(run: re.Match[str]) -> str:
    space = run[0]
    if "\n" not in space:
        return " "
    return "\n " if run.start() == 0 and space[-1] in " \t" else "\n"


CHECK = TextCheck(
    "whitespace",
    "The same text comes with other white space",
    "Build each part of the prompt in one place, with one template: the same line ends, indentation and blank lines in"
    " every service and every version. Strip what users and files bring along.",
    plain_space,
    "everywhere",
)
