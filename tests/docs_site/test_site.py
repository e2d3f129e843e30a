"""The site as it is built: without a warning, and in a browser."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["", "tutorial/", "frameworks/", "api/warmprefix/", "results/", "settings/", "cli/", "architecture/"]
WIDTHS = (360, 768, 1280)
SCHEMES = {"light": "default", "dark": "slate"}

pytestmark = pytest.mark.slow


class Address(str):
    """A page's address, in the form in which the browser opens files."""

    __slots__ = ()

    def as_uri(self) -> str:
        return str(self)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, run_script: ModuleType) -> Path:
    """Return the folder of the site, built by the command of `run.py docs`."""
    folder = tmp_path_factory.mktemp("site")
    _, [*command, built] = run_script.site_check(Path(sys.executable))
    assert built == ROOT / "build/site"
    done = subprocess.run(
        [*map(str, command), str(folder)],
        cwd=ROOT,
        env=run_script.ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site; search works only over HTTP."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_each_page_of_the_docs_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs")
        folder = path.parent if path.stem == "index" else path.with_suffix("")
        assert (site / folder / "index.html").exists(), path


def test_each_public_name_has_an_anchor(site: Path, reference: ModuleType) -> None:
    packages = reference.public_names()
    for package, names in packages.items():
        page = (site / "api" / package / "index.html").read_text("utf-8")
        for name in names:
            path = f"{package}.{name}"
            assert path in packages or f'id="{path}"' in page, path


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 70
    for page in pages:
        text = page.read_text("utf-8")
        for loading in (
            'src="http',
            "src=http",
            'rel="stylesheet" href="http',
            "fonts.g",
            'data-md-component="source"',
        ):
            assert loading not in text, f"{page.relative_to(site)}: {loading}"
        assert 'class="mermaid"' not in text  # the theme would load the program that draws it


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_and_make_no_request_elsewhere(browser: Any, address: str, width: int, scheme: str) -> None:
    for page in PAGES:
        browser.open(Address(address + page), width, scheme)
        where = f"{page or 'home'} at {width} px, {scheme}"
        root = "document.documentElement"
        assert browser.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0, where
        assert browser.evaluate("document.body.dataset.mdColorScheme") == SCHEMES[scheme], where
        hidden = "[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
        assert browser.evaluate(hidden) == [], where
        requests = [event["request"]["url"] for event in browser.events("Network.requestWillBeSent")]
        assert requests, where
        assert [url for url in requests if not url.startswith((address, "data:"))] == [], where
        for method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            assert browser.events(method) == [], where
