"""SVG text: boxes and words with everything escaped, in colours that can be read on light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

# Middle tones: dark words on them are readable, and they stand out from a light page as well as from a dark one.
PLANE_COLOURS = ("#8fbcd4", "#e3b587", "#a3c99a", "#d6a0b3", "#b9aadb", "#d8cb83", "#8fcac0", "#c9b3a0")
_STYLE = """
  .page { fill: #f6f6f3; }
  .pod { fill: #e6e6e1; stroke: #8a8a84; }
  .server { fill: #ffffff; stroke: #6d6d68; }
  .device { stroke: #6d6d68; stroke-width: 0.5; }
  text { fill: #1c1c1a; font-family: monospace; font-size: 10px; }
  .title { font-size: 15px; font-weight: bold; }
  .name { font-size: 11px; font-weight: bold; }
  .faint { fill: #55554f; }
"""


def printable(text: str) -> str:
    """Return the text with escapes for what XML does not allow or a reader cannot see."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class Canvas:
    """Collects the elements of one picture; the page is as large as what is drawn on it."""

    def __init__(self, title: str, description: str) -> None:
        self._title = printable(title)
        self._description = printable(description)
        self._elements: list[str] = []
        self._width = 0.0
        self._height = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *, colour: str | None = None, note: str = ""
    ) -> None:
        """Draw a rectangle of a class of the style, with an own colour, and a note that a pointer shows."""
        self._width, self._height = max(self._width, x + width), max(self._height, y + height)
        fill = f' style="fill:{colour}"' if colour else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
        title = f"<title>{escape(printable(note))}</title>" if note else ""
        self._elements.append(f'<rect class="{kind}" {place}{fill}>{title}</rect>' if title else
                              f'<rect class="{kind}" {place}{fill}/>')  # fmt: skip

    def text(self, x: float, y: float, text: str, kind: str = "", *, room: float | None = None) -> None:
        """Write a line that starts at x on the base line y; `room` is the width in which it has to fit."""
        shown = printable(text)
        size = 9.2 if kind == "title" else 6.8 if kind == "name" else 6.1
        if room is not None and len(shown) * size > room:
            shown = shown[: max(1, int(room / size) - 1)] + "\u2026"
        self._width = max(self._width, x + len(shown) * size)
        self._height = max(self._height, y + 4)
        attribute = f" class={quoteattr(kind)}" if kind else ""
        self._elements.append(f'<text{attribute} x="{x:g}" y="{y:g}">{escape(shown)}</text>')

    def render(self, margin: float) -> str:
        """Return the whole picture as an XML document."""
        width, height = self._width + margin, self._height + margin
        body = "\n".join(self._elements)
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self._title)}</title>\n'
            f'<desc id="description">{escape(self._description)}</desc>\n'
            f"<style>{_STYLE}</style>\n"
            f'<rect class="page" width="{width:g}" height="{height:g}"/>\n{body}\n</svg>\n'
        )
