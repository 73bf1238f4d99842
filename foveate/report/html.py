"""Build a self-contained HTML page of text, tables and figures that loads nothing external.

All arguments are escaped. Text between backticks is shown as code.
"""

import base64
import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import matplotlib
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from foveate.files import wrap_write_errors, write_text
from foveate.report.plots import SALT

Cell: TypeAlias = str | int | float | None
Tints: TypeAlias = Sequence[Sequence[float | None]]

STYLE = Path(__file__).with_name("page.css")
# With this policy the browser blocks all requests and scripts.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
UP, DOWN = "0 114 178", "213 94 0"  # blue and vermilion, safe for colour-blind readers
STRONGEST = 0.5  # opacity of the strongest tint; text stays readable in light and dark mode
NUMBER = re.compile(r"[+\-−±<>≤≥≈]?\s*\.?\d")
# Text and grid lines of matplotlib figures take the colours of the page.
INKS = {"#000000": "currentColor", "#e6e6e6": "var(--line)"}
MANY = 10  # columns above which a table gets smaller text and padding
BROAD = 7.0  # inches above which a figure scrolls on narrow screens instead of shrinking
THUMBNAIL = 160  # longer side of a gallery image in pixels
WORD_JOINER = "\u2060"  # invisible, and prevents a line break


def root_tint(difference: float | None, strongest: float) -> float | None:
    """Return a tint by the square root of a difference, so that small differences are visible.

    A difference of `strongest` or more gets the strongest tint.
    """
    if difference is None:
        return None
    return math.copysign(math.sqrt(min(1.0, abs(difference) / strongest)), difference)


class Page:
    """HTML page built from top to bottom; each method appends one element.

    All text is escaped, and text between backticks is shown as code. The page contains its
    styles, figures and images, follows the light or dark mode of the browser, and makes no
    requests.

    Args:
        title: Title of the page and its first heading.
        lead: Introductory paragraph below the title.

    Examples:
        >>> page = Page("Results", "Accuracy on the test set.")
        >>> page.table(["model", "accuracy (%)"], [["cnn", 97.1], ["fovmax", 99.3]])
        >>> page.save(Path("results.html")).name
        'results.html'
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{_text(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{_text(lead)}</p>')

    def section(self, title: str) -> None:
        """Start a section.

        Args:
            title: Heading of the section.
        """
        self._parts.append(f"<h2>{_text(title)}</h2>")

    def text(self, *paragraphs: str) -> None:
        """Add paragraphs.

        Args:
            *paragraphs: Text of each paragraph.
        """
        self._parts += [f"<p>{_text(paragraph)}</p>" for paragraph in paragraphs]

    def notice(self, *lines: str) -> None:
        """Add a highlighted warning.

        Args:
            *lines: Text of each paragraph of the warning.
        """
        inside = "".join(f"<p>{_text(line)}</p>" for line in lines)
        self._parts.append(f'<div class="notice" role="note">{inside}</div>')

    def code(self, text: str) -> None:
        """Add a code block.

        Args:
            text: Code or commands, shown verbatim.
        """
        self._parts.append(f"<pre><code>{html.escape(text)}</code></pre>")

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        colour: Tints | None = None,
        caption: str = "",
    ) -> None:
        """Add a table whose first column holds the row headers.

        Columns whose cells all start with a number are right-aligned.

        Args:
            headers: Column headers.
            rows: Cells of each row; None is shown as a dash.
            colour: Background colour of each cell, in the shape of ``rows``, from -1 (vermilion)
                through 0 or None (no colour) to 1 (blue).
            caption: Caption above the table.
        """
        for line in (*rows, *(colour or ())):
            assert len(line) == len(headers), f"{len(headers)} headers above {line}"
        numeric = [all(_is_number(row[k]) for row in rows) for k in range(len(headers))]
        head = "".join(_tag("th", _text(h), n) for h, n in zip(headers, numeric, strict=True))
        tints = colour or [[None] * len(headers)] * len(rows)
        body = "".join(_row(row, numeric, t) for row, t in zip(rows, tints, strict=True))
        above = f"<caption>{_text(caption)}</caption>" if caption else ""
        dense = ' class="dense"' if len(headers) > MANY else ""
        self._parts.append(
            f'<div class="scroll" tabindex="0"><table{dense}>{above}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def figure(self, *figures: Figure, caption: str = "", alt: str = "") -> None:
        """Add matplotlib figures as SVG, side by side or stacked on narrow screens.

        Args:
            *figures: Figures to show.
            caption: Caption below the figures.
            alt: Description for screen readers; the caption by default.
        """
        label = html.escape(alt or caption)
        shown = "".join(_drawing(figure, label) for figure in figures)
        below = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
        self._parts.append(f'<figure><div class="drawings">{shown}</div>{below}</figure>')

    def gallery(self, items: Sequence[tuple[str, Sequence[tuple[Tensor, str]]]]) -> None:
        """Add groups of captioned images.

        Args:
            items: Title of each group with its images and their captions.

        Shape:
            Each image: ``(C, H, W)`` with values from 0 to 1, where ``C`` is 1 or 3.
        """
        groups = "".join(
            f"<li><b>{_literal(title)}</b><div>{''.join(map(_picture, pictures))}</div></li>"
            for title, pictures in items
        )
        self._parts.append(f'<ul class="gallery">{groups}</ul>')

    @contextmanager
    def details(self, summary: str) -> Iterator[None]:
        """Put everything added inside the ``with`` block into a collapsible section.

        Args:
            summary: Text that is visible while the section is collapsed.

        Yields:
            Nothing; elements are added to the page itself.
        """
        self._parts.append(f"<details><summary>{_text(summary)}</summary>")
        try:
            yield
        finally:
            self._parts.append("</details>")

    def provenance(self, facts: Mapping[str, object]) -> None:
        """Add a section with the settings and versions needed to reproduce the page.

        Args:
            facts: Values by name.
        """
        self.section("Provenance")
        pairs = "".join(
            f"<dt>{_text(name)}</dt><dd>{_literal(str(value))}</dd>"
            for name, value in facts.items()
        )
        self._parts.append(f"<dl>{pairs}</dl>")

    def html(self) -> str:
        """Return the page as HTML.

        Returns:
            The complete document.
        """
        body = "\n".join(self._parts)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self.title)}</title>\n"
            f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
            f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
        )

    def save(self, path: Path) -> Path:
        """Write the page to a file atomically.

        Args:
            path: File to write; missing parent folders are created.

        Returns:
            The path.

        Raises:
            DataError: If the file cannot be written.
        """
        with wrap_write_errors(path):
            write_text(path, self.html())
        return path


def _text(text: str) -> str:
    """Escape text, mark up text between backticks as code, and keep ranges such as 1–4 together."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _literal(text))


def _literal(text: str) -> str:
    """Escape text that can contain names of classes and files, and keep ranges together."""
    return re.sub(r"(?<=\d)–(?=\d)", f"–{WORD_JOINER}", html.escape(text))


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) or cell in ("", "–") or NUMBER.match(cell) is not None


def _row(row: Sequence[Cell], numeric: Sequence[bool], tints: Sequence[float | None]) -> str:
    cells = [
        _tag("td" if k else "th", _shown(cell), numeric[k], tint)
        for k, (cell, tint) in enumerate(zip(row, tints, strict=True))
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _tag(name: str, inside: str, number: bool, tint: float | None = None) -> str:
    kind = ' class="number"' if number else ""
    strength = 0.0 if tint is None or math.isnan(tint) else max(-1.0, min(1.0, tint))
    shade = f"rgb({UP if strength > 0 else DOWN} / {STRONGEST * abs(strength):.2f})"
    style = f' style="background: {shade}"' if strength else ""
    return f"<{name}{kind}{style}>{inside}</{name}>"


def _shown(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "–"
    return _literal(f"{cell:,}" if isinstance(cell, int) else str(cell))


def _picture(picture: tuple[Tensor, str]) -> str:
    pixels, caption = picture
    values = (255 * pixels).round().to(torch.uint8).movedim(0, -1).squeeze(-1).cpu().numpy()
    buffer = io.BytesIO()
    image = Image.fromarray(values)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(buffer, "JPEG", quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    alt = html.escape(caption)
    return (
        f'<figure><img src="data:image/jpeg;base64,{data}" alt="{alt}">'
        f"<figcaption>{_literal(caption)}</figcaption></figure>"
    )


def _drawing(figure: Figure, label: str) -> str:
    broad = ' broad" tabindex="0' if figure.get_figwidth() > BROAD else ""
    return f'<div class="drawing{broad}" role="img" aria-label="{label}">{_svg(figure)}</div>'


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": SALT}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    for ink, follows in INKS.items():
        svg = svg.replace(ink, follows)
    return svg[svg.index("<svg") :].strip()  # without the XML header
