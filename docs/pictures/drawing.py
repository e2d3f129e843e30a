"""SVG drawings with a background and a description of their own, for light and dark pages."""

from __future__ import annotations

from xml.etree import ElementTree as ET

__all__ = ["Drawing", "number"]

_STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
svg { --page: #fffefc; --rule: #d9cfc0; --ink: #211c16; --dim: #655c50; --new: #ece5da }
svg { --cached: #0f766e; --on-cached: #fff; --note: #f3c9a4; --noted: #a8400f }
@media (prefers-color-scheme: dark) {
svg { --page: #1f1b17; --rule: #4a4238; --ink: #f2ece3; --dim: #b5aa9c; --new: #3a332b }
svg { --cached: #2dd4bf; --on-cached: #10241f; --note: #8a4a1a; --noted: #fb923c }
}
text { fill: var(--ink) } .dim { fill: var(--dim) } .bold { font-weight: 600 }
.good { fill: var(--cached) } .noted { fill: var(--noted) } .on-cached { fill: var(--on-cached) }
.page { fill: var(--page); stroke: var(--rule) } .frame { fill: none; stroke: var(--page); stroke-width: 2 }
.new { fill: var(--new) } .note { fill: var(--note) } .cached { fill: var(--cached) }
"""


def number(value: float) -> str:
    """Return a coordinate, with one decimal at most."""
    return f"{round(value, 1):g}"


class Drawing:
    """An SVG of a fixed size that scales with the page; text is text, in a font of the reader's system."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "height": str(height),
                "role": "img",
                "aria-labelledby": "title description",
            },
        )
        ET.SubElement(self.root, "title", id="title").text = title
        ET.SubElement(self.root, "desc", id="description").text = description
        ET.SubElement(self.root, "style").text = _STYLE
        self.box(0.5, 0.5, width - 1, height - 1, "page", rx=10)

    def box(self, x: float, y: float, width: float, height: float, look: str, rx: float = 0) -> ET.Element:
        """Draw a rectangle."""
        places = {"x": x, "y": y, "width": width, "height": height, "rx": rx}
        given = {name: number(value) for name, value in places.items() if name != "rx" or value}
        return ET.SubElement(self.root, "rect", {**given, "class": look})

    def text(self, x: float, y: float, words: str, size: float, look: str = "", anchor: str = "start") -> ET.Element:
        """Draw one line of text; `anchor` is start, middle or end."""
        attributes = {"x": number(x), "y": number(y), "font-size": number(size)}
        if look:
            attributes["class"] = look
        if anchor != "start":
            attributes["text-anchor"] = anchor
        drawn = ET.SubElement(self.root, "text", attributes)
        drawn.text = words
        return drawn

    def path(self, steps: str, look: str) -> ET.Element:
        """Draw a path."""
        return ET.SubElement(self.root, "path", {"d": steps, "class": look})

    def __str__(self) -> str:
        ET.indent(self.root, "")
        return ET.tostring(self.root, encoding="unicode") + "\n"
