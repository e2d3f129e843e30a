"""The entry point of `warmprefix` and `python -m warmprefix_tools`."""

from __future__ import annotations

import sys

from warmprefix import __version__
from warmprefix.errors import MissingExtraError
from warmprefix_tools.summaries import SUMMARIES

__all__ = ["main"]


def main() -> None:
    """Run the command line; if an extra is missing, print how to install it."""
    try:
        try:
            from warmprefix_tools.cli import app
        except MissingExtraError as error:
            sys.exit(_without_cli(sys.argv[1:], error))
        app()
    except MissingExtraError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _without_cli(arguments: list[str], error: MissingExtraError) -> int:
    """Answer `--version` and `--help`, which need no extra; return the exit status."""
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"warmprefix {__version__}\n")
        return 0
    if not arguments or arguments[0] == "--help":
        commands = "".join(f"  {name:<12}{summary}\n" for name, summary in SUMMARIES.items() if " " not in name)
        sys.stdout.write(f"Usage: warmprefix COMMAND [options]\n\n{commands}\nTo run them: {error.command}\n")
        return 0 if arguments else 2
    sys.stderr.write(f"{error}\n")
    return 2


if __name__ == "__main__":
    main()
