r"""Finds final answers in texts and reads them as numbers. For formulas see maths.py.

These functions run in an actor's event loop, so every pattern takes at most linear time, and no computed number is much
longer than its text.
"""

import re
from fractions import Fraction

MARKED = re.compile(r"####\s*(.+)")
INTEGER, EXPONENT = r"(?:\d{1,3}(?:,\d{3})+|\d+)", r"[eE][-+]?\d{1,3}"
DECIMAL = rf"((?:{INTEGER}(?:\.\d*)?|\.\d+)(?:{EXPONENT})?)"
INNER_DECIMAL = rf"(?:{INTEGER}(?:\.\d+)?|\.\d+)(?:{EXPONENT}(?!\d))?"
NUMBER = re.compile(rf"(?:-\\?\$?|\\?\$?-?){INNER_DECIMAL}(?: ?/ ?{INNER_DECIMAL})?")
"""Matches a number inside a text, without a full stop at its end. `VALUE` matches a text that is only a number."""
MINUS = str.maketrans(dict.fromkeys("\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}", "-"))
GROUPS = re.compile("(?<=\\d)[\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}](?=\\d{3}(?!\\d))")
"""Matches a space between the thousands of a number."""
VALUE = re.compile(rf"([-+]?)\\?\$?([-+]?){DECIMAL}(?: ?/ ?{DECIMAL})? ?\\?%?")


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, braces balanced; None if there is none."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def extract_marked(text: str) -> str | None:
    """Return the text after the last ####, up to the end of its line, as in GSM8K's answers; None if there is none."""
    matches = MARKED.findall(text)
    return matches[-1].strip() if matches else None


def last_number(text: str) -> str | None:
    """Return the last number in the text; None if there is none. Example: "3/4" of "The answer is 3/4."."""
    matches = NUMBER.findall(_plain(text))
    return matches[-1] if matches else None


def first_number(text: str) -> str | None:
    """Return the first number in the text; None if there is none."""
    match = NUMBER.search(_plain(text))
    return match[0] if match else None


def _plain(text: str) -> str:
    return GROUPS.sub("", text.translate(MINUS))


def number(text: str) -> Fraction | None:
    r"""Return the exact value of "1,234.50", "-$3", "1e-05", "3/4" or "50\%" (which is 50); None for anything else."""
    match = VALUE.fullmatch(_plain(text).strip())
    if match is None:
        return None
    sign, inner_sign, over, under = match.groups()
    if sign and inner_sign:
        return None
    try:
        value = _fraction(over) / _fraction(under or "1")
    except (ValueError, ZeroDivisionError):
        return None
    return -value if "-" in (sign, inner_sign) else value


def same_number(claim: str, expected: str) -> bool:
    """Return True if both texts are numbers and exactly equal."""
    value = number(claim)
    return value is not None and value == number(expected)


def _fraction(decimal: str) -> Fraction:
    # Above Python's limit of 4300 digits this raises ValueError.
    return Fraction(decimal.replace(",", ""))
