"""`warmprefix doctor`: looks at a log at the console."""

from __future__ import annotations

import json
from pathlib import Path

from warmprefix.errors import MissingExtraError
from warmprefix.outputs import check_writable, standard_output, text_file
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.export import as_json
from warmprefix_tools.doctor.options import STDOUT, DoctorOptions
from warmprefix_tools.doctor.page import doctor_page
from warmprefix_tools.doctor.readers import read_log
from warmprefix_tools.doctor.table import print_report

try:
    from rich.console import Console
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_doctor"]

_PLAIN_WIDTH = 100


def run_doctor(options: DoctorOptions) -> bool:
    """Read, look, and report; write the files that are asked for.

    Returns:
        Whether no more is lost than `options.fail_above` allows.

    Raises:
        DoctorError: No request could be read.
        OutputError: A file can't be written.
    """
    for file in options.outputs:
        check_writable(file)
    report = diagnose(read_log(options.logs), options.kv_block_size, options.capacity_tokens)
    console = Console(stderr=options.json_file == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    with standard_output():
        if options.json_file is not None:
            text = json.dumps(as_json(report), indent=1) + "\n"
            if options.json_file == STDOUT:
                print(text, end="")  # noqa: T201
            else:
                _write(options.json_file, text)
        if options.html_file is not None:
            _write(options.html_file, doctor_page(report))
        print_report(report, console)
    return options.fail_above is None or 100 * report.lost_share <= options.fail_above


def _write(path: Path, text: str) -> None:
    with text_file(path) as write:
        write(text)
