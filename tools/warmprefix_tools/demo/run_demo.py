"""The command `warmprefix demo`: runs a session, prints its report and writes its page."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from warmprefix_openai.outputs import OutputError, check_writable, standard_output
from warmprefix_tools.console import progress_bar, report_console, write_text
from warmprefix_tools.demo.demo_options import DEFAULT_PAGE, DemoOptions
from warmprefix_tools.demo.demo_report import TITLE, demo_page, print_report
from warmprefix_tools.demo.documents import LIMITS
from warmprefix_tools.demo.session import DemoResult, DemoText, prepare_session, run_session

__all__ = ["run_demo"]

_PLAIN_WIDTH = 100


def run_demo(options: DemoOptions) -> None:
    """Run a session, print its report, and write its page.

    Raises:
        DemoError: The text cannot be read, or the server does not answer.
        OutputError: The file that the options name cannot be written.
    """
    if options.html_file is not None:
        check_writable(options.html_file)
    reading = "" if options.documents is None else f"Reading at most {LIMITS} ... "
    with progress_bar(f"{reading}Asking {options.questions} questions, 4 times each ...", name_width=24) as progress:

        def announce(name: str, steps: int) -> Callable[[], None]:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        read = announce("reading the documents", 1)
        text = prepare_session(options)  # outside of the event loop, where Ctrl-C interrupts it
        read()
        try:
            result = asyncio.run(_session(options, text, announce))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    console = report_console(None)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    with standard_output():
        print_report(result, options, console)
        page = options.html_file
        if page is None and _is_free(DEFAULT_PAGE):
            page = DEFAULT_PAGE
        try:
            if page is not None:
                write_text(page, demo_page(result, options))
        except OutputError:
            if options.html_file is not None:
                raise
            page = None
        if page is not None:
            console.print(f"The same with charts: {page.resolve()}", soft_wrap=True, markup=False, highlight=False)
        else:
            console.print(f"No page was written: {DEFAULT_PAGE} cannot be. Name another file with --html.")


async def _session(
    options: DemoOptions, text: DemoText, announce: Callable[[str, int], Callable[[], object]]
) -> DemoResult:
    """Run a session that Ctrl-C cancels, so that it cleans up; `asyncio.run` itself does so from Python 3.11 on."""
    running = asyncio.current_task()
    assert running is not None
    with suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
    return await run_session(options, text, announce)


def _is_free(page: Path) -> bool:
    """Return True if there is no file of that name, but for an older page."""
    try:
        return f"<title>{TITLE}</title>" in page.read_text(encoding="utf-8", errors="replace")[:2_000]
    except FileNotFoundError:
        return True
    except OSError:
        return False
