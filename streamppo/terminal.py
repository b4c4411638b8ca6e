"""Text as a terminal and a log may have it: the words of a policy, a reward or a stranger's folder are not obeyed.

harmless    one line: whatever is in it, it begins no other line
bounded     the beginning of a text, and how much more there is
lines       a message of ours: lines after the first are indented, so that none passes for another message
"""

import unicodedata

HARMFUL = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that move a cursor, turn the direction of writing, or have no shape."""
HANGING = "  "
"""Before what is left of a line, and before further lines of a message."""


def harmless(text: str) -> str:
    """Make every character visible: a newline becomes ⏎, another one that a terminal would obey becomes ·."""
    # Most texts have nothing of it, and this is asked of every line.
    if text.isprintable():
        return text
    shown = (" " if one == "\t" else "⏎" if one == "\n" else one for one in text.replace("\r\n", "\n"))
    return "".join("·" if unicodedata.category(one) in HARMFUL else one for one in shown)


def lines(text: str) -> str:
    """Make every line of a message harmless, and indent those after the first."""
    if text.isprintable():
        return text
    return f"\n{HANGING}".join(map(harmless, text.split("\n")))


def bounded(text: str, most: int) -> str:
    """Leave out what is beyond `most` characters, and say how many that are.

    Example: "aaaaa", 3 -> "aaa... (2 characters more)".
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} characters more)"
