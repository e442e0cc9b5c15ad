"""An extension of Griffe: docstrings, which have the roles of Sphinx, become Markdown for the page on the API."""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":\w+:`(~?)([\w.]+)(\(\))?`")


def _link(role: re.Match[str]) -> str:
    """Return a link to the entry of the name, or the name alone if the page has none."""
    shown = role[2].rpartition(".")[2] if role[1] else role[2]
    return f'<autoref identifier="{role[2]}" optional><code>{shown}{role[3] or ""}</code></autoref>'


class Markdown(Extension):
    """Rewrites the docstring of each object when it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(_link, obj.docstring.value)
            obj.docstring.value = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
