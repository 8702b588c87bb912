"""Self-contained HTML pages: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .2em .8em; border-bottom: 1px solid #ccc }
th { text-align: left } td { vertical-align: top; white-space: pre-wrap } pre { white-space: pre-wrap }
svg { max-width: 100%; height: auto }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A page of HTML `parts`, which are taken as they are; the title is escaped."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, escaped here."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join([row(head, "th"), *(row(cells, "td") for cells in rows)]) + "\n</table>"
