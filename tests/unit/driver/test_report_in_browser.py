"""report.html in a headless Chromium: curves with data, values at the pointer, and no error in the console."""

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import needs_chromium, opened
from report_case import run_folder

from streamppo.config.sections import Config
from streamppo.driver import report

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

pytestmark = needs_chromium


@pytest.fixture
def page(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    run = run_folder(tmp_path / "math", math_config())
    path = report.write([run], run / report.REPORT)
    path.write_text(path.read_text().replace("</body>", POINT + "</body>"))
    return path


@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_has_curves_with_data_and_tells_the_values_under_the_pointer(page: Path, width: int) -> None:
    dom, errors = opened(page.as_uri(), width, page.parent / "browser")
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
    _, errors = opened(page.as_uri(), 500, page.parent / "browser")
    assert len(errors) == 1 and "nobody is not defined" in errors[0]
