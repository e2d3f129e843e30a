"""Who sends a request: keys of tenants, or a header that a trusted proxy sets."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path

from warmprefix.errors import WarmprefixError

__all__ = ["Access", "KeysError", "TenantKeys"]

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class KeysError(WarmprefixError, ValueError):
    """A file of keys could not be read; the message gives the line."""


class TenantKeys:
    """The tenants of a file, one per line: a name and the SHA-256 of a key, apart by white space.

    A tenant may have several lines. `printf %s "$KEY" | sha256sum` prints the digest of a key.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            KeysError: It can't be read, holds no key, or a line is not of this form.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"{path} could not be read: {error}") from error
        self._tenants: list[tuple[bytes, str]] = []
        for number, line in enumerate(lines, 1):
            words = line.split("#", 1)[0].split()
            if not words:
                continue
            if len(words) != 2 or not _DIGEST.fullmatch(words[1]):
                raise KeysError(f"{path}, line {number}: a line must have a name and a SHA-256 in hexadecimal digits")
            self._tenants.append((bytes.fromhex(words[1]), words[0]))
        if not self._tenants:
            raise KeysError(f"{path} must have one key or more, got none")

    @property
    def names(self) -> Collection[str]:
        """Names of the tenants."""
        return {name for _, name in self._tenants}

    def tenant_of(self, key: str) -> str | None:
        """Return the tenant with this key; None if there is no such key. All keys are compared, in constant time."""
        digest = sha256(key.encode("utf-8", "surrogatepass")).digest()
        found: str | None = None
        for expected, name in self._tenants:
            if hmac.compare_digest(digest, expected):
                found = name
        return found


class Access:
    """Decides which tenant a request belongs to.

    Args:
        keys: The tenants' keys; None to accept every request.
        header: Header with the tenant's name, for requests that come through a trusted proxy.
    """

    def __init__(self, keys: TenantKeys | None, header: str | None) -> None:
        self._keys = keys
        self._header = None if header is None else header.lower()

    @property
    def has_keys(self) -> bool:
        """True if clients' keys are the gateway's own, which no upstream may see."""
        return self._keys is not None

    @property
    def tenants(self) -> int:
        """Number of tenants with a key; 0 if they are not counted."""
        return 0 if self._keys is None else len(self._keys.names)

    def tenant(self, headers: Mapping[str, str]) -> tuple[bool, str | None]:
        """Return whether the request may pass, and its tenant. Names of headers are in lower case."""
        if self._keys is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            tenant = self._keys.tenant_of(given) if given else None
            return tenant is not None, tenant
        if self._header is not None:
            tenant = headers.get(self._header) or None
            return tenant is not None, tenant
        return True, None
