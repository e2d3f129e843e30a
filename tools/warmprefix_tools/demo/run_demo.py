"""The command `warmprefix demo`: runs a session, prints its report and writes its numbers."""

from __future__ import annotations

import asyncio
import math
import platform
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix.outputs import OutputError, check_writable, standard_output
from warmprefix_tools.console import progress_bar, report_console, write_json, write_text
from warmprefix_tools.demo.demo_measures import summarize_arm, summarize_workload
from warmprefix_tools.demo.demo_options import DEFAULT_PAGE, DemoOptions
from warmprefix_tools.demo.demo_report import print_report
from warmprefix_tools.demo.documents import LIMITS
from warmprefix_tools.demo.page import default_page, demo_page
from warmprefix_tools.demo.session import Announce, DemoResult, DemoText, ServedTurn, prepare_session, run_session

__all__ = ["result_as_json", "run_demo"]

_PLAIN_WIDTH = 100


def run_demo(options: DemoOptions) -> None:
    """Run a session, print its report, and write its page and the JSON file that the options name.

    Raises:
        DemoError: The text cannot be read, or the server does not answer.
        OutputError: The file cannot be written.
    """
    for file in options.files:
        check_writable(file)
    reading = "" if options.documents is None else f"Reading at most {LIMITS} ... "
    announcement = f"{reading}Asking {options.questions} questions, {2 * len(options.placements)} times each ..."
    try:
        with progress_bar(announcement, name_width=24) as progress:

            def announce(name: str, steps: int) -> Callable[[], None]:
                task = progress.add_task(name, total=steps)
                return lambda: progress.advance(task)

            read = announce("reading the documents", 1)
            text = prepare_session(options)  # outside of the event loop, where Ctrl-C interrupts it
            read()
            if text.documents is not None and text.documents.limit_remark:
                progress.console.print(text.documents.limit_remark, highlight=False)
            result = asyncio.run(_session(options, announce, text))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    console = report_console(options.json_file)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    page = options.html_file or default_page()
    with standard_output():
        write_json(options.json_file, result_as_json(result, options))
        print_report(result, options, console)
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


async def _session(options: DemoOptions, announce: Announce, text: DemoText) -> DemoResult:
    """Run a session that Ctrl-C cancels, so that it cleans up; `asyncio.run` itself does so from Python 3.11 on."""
    running = asyncio.current_task()
    assert running is not None
    with suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
    return await run_session(options, announce, text)


# -- for other programs ----------------------------------------------------------------------------------------------


def result_as_json(result: DemoResult, options: DemoOptions) -> dict[str, Any]:
    """Return options, workload, and per placement both arms' totals and requests; no secret, no prompt's text."""
    engine: dict[str, Any] = {"emulated": False, "endpoint": options.endpoint, "model": result.model}
    if result.emulator is not None:
        rate = result.emulator.prefill_rate
        engine = {
            "emulated": True,
            "kv_blocks": result.emulator.kv_blocks,
            "block_size": result.emulator.block_size,
            "base_ttft_ms": result.emulator.base_ttft_ms,
            "prefill_rate": rate if math.isfinite(rate) else None,
        }
    return {
        "warmprefix": __version__,
        "python": platform.python_version(),
        "options": {name: getattr(options, name) for name in ("k", "questions", "seed", "concurrency")},
        "engine": engine,
        "documents": None
        if result.documents is None
        else {
            "files": result.documents.files,
            "passages": len(result.documents.passages),
            "left_out": {each.reason: each.count for each in result.documents.left_out},
            "limit": result.documents.limit,
        },
        "workload": asdict(summarize_workload(result.turns)),
        "placements": {
            placement: {"relevance_order": _arm_as_json(relevance), "warmprefix": _arm_as_json(warmprefix)}
            for placement, (relevance, warmprefix) in result.runs.items()
        },
        "seconds": round(result.seconds, 3),
    }


def _arm_as_json(served: Sequence[ServedTurn]) -> dict[str, Any]:
    summary = summarize_arm(served)
    return {
        **asdict(summary),
        "hit_ratio": summary.hit_ratio,
        "prefilled_tokens": summary.prefilled_tokens,
        "per_request": [
            {
                "conversation": each.question.conversation,
                "turn": each.question.turn,
                "prompt_tokens": each.answer.prompt_tokens,
                "cached_tokens": each.answer.cached_tokens,
                "ttft": each.ttft,
                "planning": each.context.planning_seconds,
                "labels": [block.label for block in each.context.blocks],
                "references": [block.label for block in each.context.blocks if block.is_reference],
            }
            for each in served
        ],
    }
