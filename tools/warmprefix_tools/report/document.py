"""The frame of a page."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from warmprefix_tools.report.markup import Markup, element, join

__all__ = ["document"]


def document(title: str, *body: str | None) -> str:
    """A whole page. Its content security policy allows this one stylesheet and nothing else, not even inline styles.

    So whatever got into the body, nothing is loaded, sent or run.
    """
    style = resources.files("warmprefix_tools.report").joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name_="color-scheme", content="light dark"),
        element("meta", name_="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    line = Markup("\n")
    page = element("html", line, head, line, element("body", line, join(*body), line), line, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"
