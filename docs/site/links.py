"""A hook of mkdocs: pages are written for the repository's own web page, and the site differs from it in two things.

`[the loop](../streamppo/loop.py)` becomes a link into the repository if mkdocs.yml has a `repo_url`, and otherwise
"the loop (`streamppo/loop.py`)". Pages are right under docs/, so a link that begins with `../` leaves the site.
A `\\|` in the code of a table is a `|` there; mkdocs would show both characters.
"""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
CODE = re.compile(r"`[^`\n]*`")
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Write one page as mkdocs reads it."""
    plain = CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown)
    return OUTSIDE.sub(partial(_replaced, repository=config.repo_url), plain)


def _replaced(link: re.Match[str], repository: str | None) -> str:
    text, path = link.groups()
    if not (REPOSITORY / path).exists():
        # It stays as it is: mkdocs says that it leads nowhere.
        return link[0]
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
