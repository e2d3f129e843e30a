"""What `warmprefix` and `python -m warmprefix` run."""

from __future__ import annotations

import sys

from warmprefix.errors import MissingExtraError

__all__ = ["main"]


def main() -> None:
    """Run the command line; if an extra is missing, say how to get it and exit with status 2."""
    try:
        from warmprefix.cli import app

        app()
    except MissingExtraError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
