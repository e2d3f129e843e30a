"""What plugins tell a gateway about a request."""

from __future__ import annotations

import re

__all__ = ["APPLICATION_HEADER", "SESSION_HEADER", "gateway_headers"]

SESSION_HEADER = "x-session-id"
"""Header that names the session of a request."""
APPLICATION_HEADER = "x-warmprefix-application"
"""Header with the name that a gateway shows for the application. It goes no further."""

_CAN_STAND = re.compile(r"[!-~](?:[ -~]{0,1022}[!-~])?")
"""HTTP clients refuse a value with white space at its ends, and servers refuse a long one."""


def gateway_headers(application: str, session_id: str | None) -> dict[str, str]:
    """Return the headers of a request of an application.

    A session id that cannot stand in a header is left out: the gateway then finds the session by its messages.

    >>> gateway_headers("Hermes", "20261126_7")
    {'x-warmprefix-application': 'Hermes', 'x-session-id': '20261126_7'}
    """
    headers = {APPLICATION_HEADER: application}
    if session_id and _CAN_STAND.fullmatch(session_id):
        headers[SESSION_HEADER] = session_id
    return headers
