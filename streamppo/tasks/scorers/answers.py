"""Final answers in texts: found, normalised, compared. No dependencies; for symbolic equality see mathverify.py.

The actor's event loop waits for it: no pattern here takes more than linear time, and no number is computed that is much
longer than its text.
"""

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+")
MARKED = re.compile(r"####\s*(.+)")

GROUP = r"\{(?:[^{}]|\{[^{}]*\})*+\}"
SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:text|mbox|textbf|mathrm|textrm)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:left|right)(?![a-zA-Z])|\\?[$%]|(?<!\\)\\!|\^\\circ|\^\{\\circ\}|°", ""),
        (r"(?<!\\)\\[,;: ]|\s", " "),
        (r" +", " "),
        (r" ?([-+=(){}\[\],^_/]) ?", r"\1"),
        (r"\{,\}", ","),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(frac|sqrt) ?(\w)", r"\\\1{\2}"),
        (rf"(\\frac{GROUP})(\w)", r"\1{\2}"),
        (r"([_^])\{(\w)\}", r"\1\2"),
    )
)
"""What is written in several ways, and the one that is kept; in this order."""
FUNCTION = rf"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp)(?:[_^](?:\w|{GROUP}))*+"
FRACTION = re.compile(rf"(?:([_^]|\\sqrt|{FUNCTION}) ?)?\\frac({GROUP})({GROUP})(?=(\^?))")
NESTED = 4
"""So deep, fractions in fractions are understood."""
INNER = re.compile(rf"{GROUP}|\([^()]*\)")
SUM = re.compile(r".(?:[-+]|\\pm|\\mp)")
ATOM = re.compile(rf"(?:\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+(?:{GROUP})?|\([^()]*\))(?:\^(?:\w|{GROUP}))?!?")
UNITS = re.compile(r"(?<=\d) ?(?:degrees?|dollars?|cents?|inches|inch|feet|foot|cm|meters?|miles?|hours?|minutes?)$")
VARIABLE = re.compile(r"^[a-z]=(?=[^=]*$)")
SPACE = re.compile(r" (?![\d.])|(?<![\d.]) ")

DECIMAL = r"((?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,3})?)"
VALUE = re.compile(rf"([-+]?)(?:(\d+) (?=\d+/\d+$))?{DECIMAL}(?:/{DECIMAL})?")


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} or \fbox{...}, braces balanced; None if there is none."""
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


def marked(text: str) -> str | None:
    """What follows the last ####, as in GSM8K's own answers; None if there is none."""
    found = MARKED.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    """The last number of the text, as it stands there; None if there is none."""
    found = NUMBER.findall(text)
    return found[-1] if found else None


def first_number(text: str) -> str | None:
    """The first number of the text, as it stands there; None if there is none."""
    found = NUMBER.search(text)
    return found[0] if found else None


def number(text: str) -> Fraction | None:
    r"""The exact value of "1,234.50", "$3", "3/4", "\frac{3}{4}", "2\frac{1}{2}" or "50\%"; None for anything else."""
    found = VALUE.fullmatch(normalised(text))
    # "1, 234" are two numbers.
    if found is None or re.search(r",\s", text):
        return None
    sign, whole, over, under = found.groups()
    try:
        value = int(whole or 0) + _fraction(over) / _fraction(under or "1")
    except (ValueError, ZeroDivisionError):
        return None
    return -value if sign == "-" else value


def _fraction(decimal: str) -> Fraction:
    """Raises `ValueError` beyond the digits that Python converts (4300)."""
    return Fraction(decimal.replace(",", "").replace(" ", ""))


def normalised(text: str) -> str:
    r"""One spelling for answers that are written in several: "(x+1)/2" for "\dfrac{x + 1}2", "2 1/2" for "2\frac12"."""
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    for _ in range(NESTED):
        text = FRACTION.sub(_with_slash, text)
    text = UNITS.sub("", re.sub(" +", " ", text).strip().rstrip("."))
    return VARIABLE.sub("", SPACE.sub("", text).lower())


def _with_slash(found: re.Match[str]) -> str:
    """A fraction as people type it, in parentheses wherever it would be read as another one without them."""
    before, over, under, power = found[1] or "", found[2][1:-1].strip(), found[3][1:-1].strip(), found[4]
    start = found.start()
    signed = over.startswith("-") and start > 0 and found.string[start - 1] not in "([{,="
    over = f"({over})" if SUM.search(INNER.sub("x", over)) else over
    under = under if ATOM.fullmatch(under) else f"({under})"
    if before in ("^", "_", r"\sqrt"):
        return f"{before}{{{over}/{under}}}"
    if before or power or signed:
        return f"{before}({over}/{under})"
    return f" {over}/{under} "


def equal(given: str, wanted: str) -> bool:
    """Whether two answers are the same number, or the same text once spelled alike."""
    if normalised(given) == normalised(wanted):
        return True
    first, second = number(given), number(wanted)
    return first is not None and first == second
