"""One process at a time: a lock on an open file, which ends with the process that holds it."""

from __future__ import annotations

import sys

__all__ = ["lock"]

if sys.platform == "win32":
    import msvcrt
    import os

    _BEYOND_ANY_FILE = 1 << 40

    def lock(descriptor: int) -> bool:
        """Try to take it, without waiting; whether it was free. Closing the file gives it back."""
        os.lseek(descriptor, _BEYOND_ANY_FILE, os.SEEK_SET)  # what is locked can't be read through another handle
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True
else:
    import fcntl

    def lock(descriptor: int) -> bool:
        """Try to take it, without waiting; whether it was free. Closing the file gives it back."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
