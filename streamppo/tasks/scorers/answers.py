"""Final answers in texts: found, normalised, compared. No dependencies; for symbolic equality see mathverify.py."""

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\.\d+")
MARKED = re.compile(r"####\s*(.+)")
TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm|textrm)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
DROPPED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\:", r"\ ", r"\$", "$", r"\%", "%", r"^\circ", r"^{\circ}", "°")
UNITS = re.compile(r"(?<=\d)\s*(?:degrees?|dollars?|cents?|inches|inch|feet|foot|cm|meters?|miles?|hours?|minutes?)$")


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
    r"""The exact value of "1,234.50", "$3", "3/4", "\frac{3}{4}" or "50\%"; None for anything else."""
    plain = normalised(text).replace(",", "")
    sign, body = (-1, plain[1:]) if plain.startswith("-") else (1, plain)
    try:
        return sign * Fraction(body)
    except (ValueError, ZeroDivisionError):
        return None


def normalised(text: str) -> str:
    """One spelling for answers that are written in several."""
    text = TEXT.sub(r"\1", text.strip())
    for piece in DROPPED:
        text = text.replace(piece, "")
    text = FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    text = UNITS.sub("", text.strip().rstrip("."))
    return re.sub(r"\s+", "", text).lower()


def equal(given: str, wanted: str) -> bool:
    """Whether two answers are the same number, or the same text once spelled alike."""
    if normalised(given) == normalised(wanted):
        return True
    first, second = number(given), number(wanted)
    return first is not None and first == second
