"""HTML pages from Jinja templates: escaped, self-contained and without scripts."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from warmprefix.errors import MissingExtraError
from warmprefix_tools.report import amounts
from warmprefix_tools.report.visible import code_points, signs, visible

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as exc:
    raise MissingExtraError("cli", "jinja2") from exc

__all__ = ["environment", "render_page"]


def render_page(template: str, **values: object) -> str:
    """Return the page of a template, such as `replay/page.html`.

    Equal values make equal bytes. Templates extend `report/base.html`, which needs the value `title`, and draw with the
    macros of `report/charts.html`. The content security policy of the base allows one style sheet and nothing else, not
    even inline styles. So a page loads, sends and runs nothing, whatever text gets into its body.
    """
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """Return the environment, which escapes text and makes control characters visible."""
    style = resources.files("warmprefix_tools.report").joinpath("style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    templates = Environment(
        loader=PackageLoader("warmprefix_tools", "."),
        autoescape=True,
        finalize=_finalized,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals.update(
        style=Markup(style),  # noqa: S704 - our own file
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
    )
    templates.filters.update({name: getattr(amounts, name) for name in amounts.__all__})
    templates.filters.update(signs=signs, code_points=code_points)
    return templates


def _finalized(value: object) -> object:
    """Return a value as it is put into a page, before Jinja escapes it."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
