"""From files to requests, whatever wrote the files."""

from __future__ import annotations

from warmprefix_tools.doctor.readers.log import ReadLog, read_log

__all__ = ["ReadLog", "read_log"]
