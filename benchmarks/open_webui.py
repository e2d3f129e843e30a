"""Prompt tokens that an engine behind a real Open WebUI finds cached, and citations that point to the right documents.

    WARMPREFIX_OPEN_WEBUI=PROGRAM python benchmarks/open_webui.py [--write]

A browser asks the same questions without the filter function and with it, each in a chat of its own; see
`tests/outside/open_webui.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.outside.open_webui import measured
from tests.tools.report.conftest import BROWSERS, Browser

from common import print_table
from result_files import write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise SystemExit("There is no browser: install chromium.")
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(program, Path(folder))
        try:
            arms = list(measured(browser, Path(folder)))
            rows = [
                {
                    **arm._asdict(),
                    "wrong": len(arm.wrong),
                    "cached_percent": round(100 * arm.cached_tokens / arm.prompt_tokens, 1),
                }
                for arm in arms
            ]
        finally:
            browser.close()
    print(*[answer for arm in arms for answer in arm.wrong], sep="\n")
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if options.write:
        write_rows("open_webui", rows, ["installed"])


if __name__ == "__main__":
    main()
