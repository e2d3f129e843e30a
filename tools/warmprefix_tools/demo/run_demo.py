"""The command `warmprefix demo`: runs a session, prints its report and writes its page."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from warmprefix.errors import MissingExtraError
from warmprefix_openai.outputs import OutputError, check_writable, standard_output
from warmprefix_tools.console import progress_bar, report_console, write_json, write_text
from warmprefix_tools.demo.demo_options import DEFAULT_PAGE, DemoOptions
from warmprefix_tools.demo.demo_report import TITLE, demo_fields, demo_page, print_report
from warmprefix_tools.demo.documents import LIMITS
from warmprefix_tools.demo.servers import LOCAL_THREADS
from warmprefix_tools.demo.session import MODEL_SECONDS, DemoResult, DemoText, prepare_session, run_session
from warmprefix_tools.local.llama_server import check_llama_cpp
from warmprefix_tools.local.weights import MODEL, fetch_weights
from warmprefix_tools.option_checks import output_files
from warmprefix_tools.report.amounts import counted

try:
    from rich.console import Console
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_demo"]

_PLAIN_WIDTH = 100


def run_demo(options: DemoOptions) -> None:
    """Run a session, print its report, and write its page.

    Raises:
        DemoError: The text cannot be read, or the server does not answer.
        OutputError: The file that the options name cannot be written.
    """
    for file in output_files({"--html": options.html_file, "--json": options.json_file}):
        check_writable(file)
    if options.model:
        _prepare_model(options)
    reading = "" if options.documents is None else f"Reading at most {LIMITS} ... "
    times = 2 if options.model else 4
    with progress_bar(f"{reading}Asking {options.number} questions, {times} times each ...", name_width=24) as progress:

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
    console = report_console(options.json_file)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    with standard_output():
        print_report(result, options, console)
        write_json(options.json_file, demo_fields(result, options))
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


def _prepare_model(options: DemoOptions) -> None:
    """Announce size and time, then fetch the model on this machine."""
    check_llama_cpp()
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{MODEL} answers {counted(options.number, 'question')} twice, on {counted(LOCAL_THREADS, 'thread')} of this"
        f" machine. The last question is asked {MODEL_SECONDS / 60:g} minutes after the first one at the latest.",
        soft_wrap=True,
    )
    fetch_weights(lambda line: console.print(line, soft_wrap=True, markup=False))


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
