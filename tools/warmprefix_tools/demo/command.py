"""`warmprefix demo`: runs a session at the console."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo.errors import DemoError
from warmprefix_tools.demo.export import as_json
from warmprefix_tools.demo.options import DemoOptions
from warmprefix_tools.demo.report import print_report
from warmprefix_tools.demo.session import Announce, DemoResult, run_session

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_demo"]

_PLAIN_WIDTH = 100


def run_demo(options: DemoOptions) -> None:
    """Run and report; write the JSON file, if one is asked for.

    Raises:
        DemoError: It can't be done, or the file can't be written.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
        asked = f"Asking {options.questions} questions, {2 * len(options.placements)} times each ..."
        Console(stderr=True, highlight=False).print(asked)
    progress = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def announce(name: str, steps: int) -> Callable[[], None]:
        task = progress.add_task(name, total=steps)
        return lambda: progress.advance(task)

    try:
        with progress if console.is_terminal else nullcontext():  # an older rich ends a disabled one with a newline
            result = asyncio.run(_session(options, announce))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    print_report(result, options, console)
    if options.json_file is not None:
        try:
            options.json_file.write_text(json.dumps(as_json(result, options), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DemoError(f"Cannot write {options.json_file}: {error.strerror}.") from error


async def _session(options: DemoOptions, announce: Announce) -> DemoResult:
    """Run it; Ctrl-C cancels it, so that it ends in order, as `asyncio.run` itself sees to from Python 3.11 on."""
    running = asyncio.current_task()
    assert running is not None
    with suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
    return await run_session(options, announce)
