"""A hook of MkDocs: links that leave ``docs/``, such as those to tests, and records that stay out of the search.

On GitHub such a link leads to the file. The site has no page for it, so the text of the link remains. If ``repo_url``
is set in ``mkdocs.yml``, the link leads to the repository. A link to a file that does not exist ends the build.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the links of a page."""
    folder = (DOCS / page.file.src_uri).parent
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        if target.is_relative_to(DOCS):
            return link[0]
        if not config.repo_url:
            return link[1]
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{target.relative_to(ROOT)}{link[3] or ''})"

    return _LINK.sub(replaced, markdown)
