"""The entry point of `warmprefix` and `python -m warmprefix_tools`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from warmprefix import __version__
from warmprefix.errors import MissingExtraError

__all__ = ["main"]


def main() -> None:
    """Run the command line; if an extra is missing, say how to get it and exit with status 2."""
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
        commands = "".join(f"  {name:<12}{summary}\n" for name, summary in _commands())
        sys.stdout.write(f"Usage: warmprefix COMMAND [options]\n\n{commands}\nTo run them: {error.command}\n")
        return 0 if arguments else 2
    sys.stderr.write(f"{error}\n")
    return 2


def _commands() -> Iterator[tuple[str, str]]:
    """Yield each command's name and summary, read from the source of the CLI, which cannot be imported."""
    source = Path(__file__).with_name("cli.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if decorators & {"app.command()", "state_commands.callback()"}:
                yield node.name.replace("_", "-"), (ast.get_docstring(node) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
