"""Four drawing operations with two outputs: SVG as text, and PNG through Pillow (extra `edgekv[charts]`)."""

from __future__ import annotations

from typing import Protocol
from xml.sax.saxutils import escape, quoteattr

from edgekv.errors import UserError

FONT = "system-ui, sans-serif"


class Canvas(Protocol):
    """Coordinates in pixels, origin top left. Colours as '#rrggbb'."""

    width: int
    height: int

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1.0, dashed: bool = False) -> None: ...

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None: ...

    def dot(self, x: float, y: float, radius: float, colour: str) -> None: ...

    def text(self, x: float, y: float, text: str, size: int = 12, colour: str = "#333333", anchor: str = "start") -> None:
        """y is the base line; anchor is start, middle or end."""
        ...


class SvgCanvas:
    """Collects SVG elements; `str()` of it is the document."""

    def __init__(self, width: int, height: int):
        self.width, self.height, self._parts = width, height, []

    def line(self, points, colour, width=1.0, dashed=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}/>')

    def box(self, x, y, width, height, colour):
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{colour}"/>')

    def dot(self, x, y, radius, colour):
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>')

    def text(self, x, y, text, size=12, colour="#333333", anchor="start"):
        style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-family={quoteattr(FONT)}'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(self._parts) + "\n</svg>"


class PngCanvas:
    """The same through Pillow, drawn at twice the size and halved, which smooths the edges."""

    SCALE = 2

    def __init__(self, width: int, height: int):
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise UserError("PNG charts need Pillow: pip install 'edgekv[charts]'; --html needs nothing.") from None
        self.width, self.height, self._font, self._fonts = width, height, ImageFont.load_default, {}
        self.image = Image.new("RGB", (width * self.SCALE, height * self.SCALE), "#ffffff")
        self._draw = ImageDraw.Draw(self.image)

    def line(self, points, colour, width=1.0, dashed=False):
        scaled = [(x * self.SCALE, y * self.SCALE) for x, y in points]
        thick = max(1, round(width * self.SCALE))
        if not dashed:
            self._draw.line(scaled, colour, thick, joint="curve")
            return
        for (x0, y0), (x1, y1) in zip(scaled, scaled[1:], strict=False):
            pieces = max(1, round(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 / (9 * self.SCALE)))
            for i in range(pieces):
                a, b = i / pieces, (i + 0.55) / pieces
                ends = [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for t in (a, b)]
                self._draw.line(ends, colour, thick)

    def box(self, x, y, width, height, colour):
        s = self.SCALE
        if width * s >= 1 and height * s >= 1:
            self._draw.rectangle((x * s, y * s, (x + width) * s - 1, (y + height) * s - 1), colour)

    def dot(self, x, y, radius, colour):
        s = self.SCALE
        self._draw.ellipse(((x - radius) * s, (y - radius) * s, (x + radius) * s, (y + radius) * s), colour)

    def text(self, x, y, text, size=12, colour="#333333", anchor="start"):
        font = self._fonts.setdefault(size, self._font(size * self.SCALE))
        side = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        self._draw.text((x * self.SCALE, y * self.SCALE), text, colour, font, side)

    def save(self, path) -> None:
        from PIL import Image

        self.image.resize((self.width, self.height), Image.LANCZOS).save(path, "PNG")
