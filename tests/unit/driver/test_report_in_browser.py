"""report.html in a headless Chromium: curves with data, values at the pointer, and no error in the console."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import needs_chromium, opened
from report_case import run_folder

from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.telemetry.report.page import PANELS

POINT = """
<script>
const first = document.querySelector("svg.curves"), frame = first.getBoundingClientRect();
first.dispatchEvent(new PointerEvent("pointermove", { clientX: frame.right - 1, clientY: frame.top + 5 }));
document.body.dataset.wide = String(document.documentElement.scrollWidth - document.documentElement.clientWidth);
document.body.dataset.drawn = String([...document.querySelectorAll("svg.curves")].filter(
  (svg) => [...svg.querySelectorAll("polyline")].some((line) => line.getBoundingClientRect().width > 100)).length);
</script>
"""
"""Points at the right end of the first curve, and notes sizes on the screen."""

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


PHONE = """
<script>
const wide = (one) => one.scrollWidth > one.clientWidth + 1;
const cut = [...document.querySelectorAll("td, th, h1, h2, h3, p, b, span")].filter((one) =>
  wide(one) && getComputedStyle(one).overflowX === "visible" && getComputedStyle(one).display !== "inline");
const root = document.documentElement;
parent.postMessage({ body: root.scrollWidth, of: root.clientWidth, cut: cut.length }, "*");
</script>
"""
"""Tells the page around it how wide this one is, and how many elements have words that stick out."""
AROUND = """
<script>addEventListener("message", (told) => { document.body.dataset.told = JSON.stringify(told.data); });</script>
<iframe src="report.html" width="360" height="740" style="border: 0"></iframe>
"""


def test_on_a_phone_the_page_is_as_wide_as_the_phone_and_tables_scroll_in_themselves(page: Path) -> None:
    # A headless window is at least 500 pixels wide, and a frame in it is not.
    many = f"<table><tr>{'<td class=number>1,234,567,890</td>' * 6}</tr>"
    text = page.read_text()
    assert "<table>" in text
    page.write_text(text.replace("<table>", many, 1).replace("</body>", PHONE + "</body>"))
    around = page.with_name("around.html")
    around.write_text(f"<body>{AROUND}</body>")
    dom, errors = opened(around.as_uri(), 500, page.parent / "browser", seconds=3)
    told = re.search(r'data-told="([^"]*)"', dom)
    assert errors == [] and told is not None
    sizes = json.loads(html.unescape(told[1]))
    assert sizes["body"] == sizes["of"] <= 360 and sizes["cut"] == 0


def test_curves_say_in_a_sentence_what_to_conclude_from_them(page: Path) -> None:
    text = page.read_text()
    for panel in ("Entropy", "KL", "Effective sample size", "Ratio", "Lag"):
        figure = text.partition(f"<h3>{panel}</h3>")[2].partition("</figure>")[0]
        (says,) = [one.says for one in PANELS if one.title == panel]
        assert says and f"<p>{html.escape(says)}</p>" in figure
