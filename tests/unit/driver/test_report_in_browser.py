"""report.html in a headless Chromium: curves with data, values at the pointer, and no error in the console."""

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from report_case import run_folder

from streamppo.config.sections import Config
from streamppo.driver import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
POINT = """
<script>
const first = document.querySelector("svg.curves"), frame = first.getBoundingClientRect();
first.dispatchEvent(new PointerEvent("pointermove", { clientX: frame.right - 1, clientY: frame.top + 5 }));
document.body.dataset.wide = String(document.documentElement.scrollWidth - document.documentElement.clientWidth);
document.body.dataset.drawn = String([...document.querySelectorAll("svg.curves")].filter(
  (svg) => [...svg.querySelectorAll("polyline")].some((line) => line.getBoundingClientRect().width > 100)).length);
</script>
"""
"""Points at the right end of the first curve, and writes down sizes as they are on the screen."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")


def opened(page: Path, width: int) -> tuple[str, list[str]]:
    """The page as it is after its scripts have run, and the errors in the console."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    places = [f"--window-size={width},2000", f"--user-data-dir={page.parent / 'browser'}"]
    done = subprocess.run(
        [CHROMIUM or "", *flags, *places, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    run = run_folder(tmp_path / "math", math_config())
    path = report.write([run], run / report.REPORT)
    path.write_text(path.read_text().replace("</body>", POINT + "</body>"))
    return path


@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_has_curves_with_data_and_tells_the_values_under_the_pointer(page: Path, width: int) -> None:
    dom, errors = opened(page, width)
    assert errors == []
    drawn = re.search(r'data-drawn="(\d+)"', dom)
    assert drawn is not None and int(drawn[1]) == dom.count('class="curves"') >= 15
    shown = [html.unescape(tip) for tip in re.findall(r'<div class="tip">([^<]*)</div>', dom)]
    assert shown[0].startswith("update 24  ·  reward 0.")
    assert 'data-wide="0"' in dom, "the page is wider than the window"
    # A pointer at one chart shows nothing at another.
    assert len(shown) == 1


def test_an_error_in_the_page_is_seen(page: Path) -> None:
    page.write_text(page.read_text().replace("</body>", "<script>nobody.knows()</script></body>"))
    _, errors = opened(page, 500)
    assert len(errors) == 1 and "nobody is not defined" in errors[0]
