"""A hook of mkdocs: changes two things of the pages, which are written for the repository's web page.

`[the loop](../streamppo/loop.py)` becomes a link into the repository if mkdocs.yml has a `repo_url`, and otherwise
"the loop (`streamppo/loop.py`)". All pages are directly in docs/, so a link that begins with `../` leaves the site.
A `\\|` in the code of a table becomes `|`, because mkdocs would show both characters.
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
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]+)?\)")


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Return the text of a page for mkdocs."""
    plain = CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown)
    return OUTSIDE.sub(partial(_replaced, repository=config.repo_url), plain)


def _replaced(link: re.Match[str], repository: str | None) -> str:
    text, path, anchor = link.groups(default="")
    if not (REPOSITORY / path).exists():
        # mkdocs warns that the unchanged link leads nowhere.
        return link[0]
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
