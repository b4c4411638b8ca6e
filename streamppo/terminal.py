"""Makes untrusted text from policies, rewards or other people's folders safe for terminals and logs, and words counts.

harmless    a text in one line without control characters
bounded     the beginning of a text, and the number of characters left out
quoted      the beginning of a text, in quotes
counted     a number with its noun, in the plural except for 1
wrap        the lines of a text, wrapped to the terminal's width
lines       a message of several lines; its later lines are indented, so that no line looks like a separate message
"""

import re
import unicodedata

HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that move the cursor, change the writing direction, or are invisible."""
HANGING = "  "
"""Indentation of wrapped rows, and of a message's lines after the first."""
ESCAPE = re.compile(r"\033\[[0-9;]*[A-Za-z]")
"""A colour or another escape sequence, which takes no cells of the terminal."""


def harmless(text: str) -> str:
    """Make every character visible: a newline becomes ⏎, a tab becomes a space, other harmful characters become ·."""
    # A shortcut for most texts: this function is called for every line.
    if text.isprintable():
        return text
    shown = (
        " " if character == "\t" else "⏎" if character == "\n" else character
        for character in text.replace("\r\n", "\n")
    )
    return "".join("·" if unicodedata.category(character) in HARMFUL else character for character in shown)


def lines(text: str) -> str:
    """Make every line of a message harmless, and indent the lines after the first."""
    if text.isprintable():
        return text
    return f"\n{HANGING}".join(map(harmless, text.split("\n")))


def bounded(text: str, most: int) -> str:
    """Return the first `most` characters, and the number of characters that follow.

    Example: "aaaaa", 3 -> "aaa... (2 characters more)".
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} characters more)"


def quoted(text: str, most: int = 40) -> str:
    """Return the first `most` characters in quotes. Example: "aaaaa", 3 -> "'aaa...'"."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural except for 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def wrap(text: str, columns: int) -> str:
    """Wrap each line of `text` between words to `columns` cells; 0 columns: no wrapping.

    A word wider than a row is not split. The terminal wraps it, so that a user can still copy it.
    """
    return "\n".join(_wrapped(line, columns) for line in text.split("\n")) if columns else text


def _wrapped(line: str, columns: int) -> str:
    # A line with a carriage return is a progress bar, which is not wrapped.
    if (len(line) <= columns and line.isascii()) or "\r" in line:
        return line
    # This import is slow, and most lines are short enough to do without it.
    from rich.cells import cell_len

    if cell_len(ESCAPE.sub("", line)) <= columns:
        return line
    rows, room = [""], columns
    for word in re.split(r"(?<=\S)(?= )", line):
        cells = cell_len(ESCAPE.sub("", word))
        if cells <= room or rows == [""]:
            rows[-1] += word
            room -= cells
        else:
            rows.append(HANGING + word.lstrip(" "))
            room = columns - cell_len(ESCAPE.sub("", rows[-1]))
    return "\n".join(rows)
