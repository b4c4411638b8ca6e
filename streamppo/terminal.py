"""Makes untrusted text, of a policy, a reward or a foreign folder, safe for terminals and logs.

harmless    one line: it contains no control characters and no line breaks
bounded     the beginning of a text, and the number of characters left out
quoted      the beginning of a text, in quotes
wrap        a text's lines as rows of a terminal
lines       a message of streamppo: lines after the first are indented, so that none looks like another message
"""

import re
import unicodedata

HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that move the cursor, change the writing direction, or are invisible."""
HANGING = "  "
"""Indentation of wrapped rows and of the further lines of a message."""
ESCAPE = re.compile(r"\033\[[0-9;]*[A-Za-z]")
"""A colour or another terminal sequence, which takes no cells."""


def harmless(text: str) -> str:
    """Make every character visible: a newline becomes ⏎, a tab a space, any other harmful character becomes ·."""
    # The fast path of most texts: this is called for every line.
    if text.isprintable():
        return text
    shown = (
        " " if character == "\t" else "⏎" if character == "\n" else character
        for character in text.replace("\r\n", "\n")
    )
    return "".join("·" if unicodedata.category(character) in HARMFUL else character for character in shown)


def lines(text: str) -> str:
    """Make every line of a message harmless, and indent those after the first."""
    if text.isprintable():
        return text
    return f"\n{HANGING}".join(map(harmless, text.split("\n")))


def bounded(text: str, most: int) -> str:
    """Keep the first `most` characters, and state how many are left out.

    Example: "aaaaa", 3 -> "aaa... (2 characters more)".
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} characters more)"


def quoted(text: str, most: int = 40) -> str:
    """Quote the first `most` characters. Example: "aaaaa", 3 -> "'aaa...'"."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def wrap(text: str, columns: int) -> str:
    """Wrap each line of `text` that has more cells than `columns`, between words; 0 columns: no wrapping.

    A word wider than a row is not split here: the terminal wraps it, and it can still be copied.
    """
    return "\n".join(_wrapped(line, columns) for line in text.split("\n")) if columns else text


def _wrapped(line: str, columns: int) -> str:
    # A line with a carriage return is a progress bar.
    if (len(line) <= columns and line.isascii()) or "\r" in line:
        return line
    # A slow import; most lines are short and do not need it.
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
