"""The lesson's page: sections of text, code, tables and pictures, written as one HTML file.

The file is complete in itself: styles, scripts and pictures lie inside it, and nothing is loaded
from anywhere. ``page.html`` beside this file is the template, with all of the design.

    section = Section("weights", "What a weight is")
    section.text("Weights of a query **sum to 1**.")
    with theme():
        figure = torch_attn.plots.heatmap(weights)
    section.picture("weights", figure, "Each row sums to 1.", alt="Four by four weights")
    write([section], Path("out"), title="A lesson", lead="In one page.", footer="")
"""

from __future__ import annotations

import csv
import html
import io
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from urllib.parse import quote

import matplotlib as mpl
import matplotlib.style
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from torch import Tensor

# Colours in which figures are drawn, and the variables of page.html that stand in their place in
# the page, so that one picture serves light and dark. In the PNGs they are seen as they are. No
# colour scale contains them.
INK, SOFT, LINE, PAPER = "#1d2229", "#5c6571", "#dde1e7", "#fdfdfb"
SENTINELS = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", PAPER: "var(--paper)"}

_MARKDOWN = MarkdownIt("commonmark", {"typographer": True}).enable(["replacements", "smartquotes"])


def markdown(text: str) -> str:
    """HTML of some Markdown; quotation marks and dashes are set as a printer would."""
    return str(_MARKDOWN.render(cleandoc(text)))


@contextmanager
def theme() -> Iterator[None]:
    """Figures made and saved inside have the page's colours, whatever else is set."""
    colours = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.edgecolor": SOFT,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": LINE,
        "figure.facecolor": PAPER,
        "axes.facecolor": "none",
        "legend.facecolor": PAPER,
        "legend.edgecolor": LINE,
        "patch.edgecolor": INK,
        "hatch.color": SOFT,
        "font.size": 10.0,
        "axes.titlesize": 11.0,
        "axes.titlelocation": "left",
        "svg.fonttype": "path",
        "svg.hashsalt": "attn",
        "savefig.dpi": 150,
    }
    with mpl.style.context(colours, after_reset=True):
        yield


@dataclass
class Numbers:
    """What a table shows and its CSV file holds.

    A number is shown with four significant digits and stored in full; text is taken as it is.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]

    def __post_init__(self) -> None:
        self.rows = [list(row) for row in self.rows]

    @classmethod
    def matrix(
        cls,
        values: Tensor,
        queries: Sequence[str],
        keys: Sequence[str],
        corner: str = "query \\ key",
    ) -> Numbers:
        """Numbers of [L, S], one row a query and one column a key."""
        rows = values.tolist()
        if len(rows) != len(queries) or any(len(row) != len(keys) for row in rows):
            raise ValueError(
                f"values are {list(values.shape)} for {len(queries)} queries and {len(keys)} keys"
            )
        return cls([corner, *keys], [[name, *row] for name, row in zip(queries, rows, strict=True)])

    def html(self, caption: str) -> str:
        head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in self.columns)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(_shown(cell))}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        title = f"<caption><span>{_inline(caption)}</span></caption>" if caption else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="Table">'
            f"<table>{title}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def download(self, name: str) -> str:
        """A link that saves the numbers as `name`.csv."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])
        return (
            f'<a class="download" download="{name}.csv" '
            f'href="data:text/csv;charset=utf-8,{quote(file.getvalue())}">Download as CSV</a>'
        )

    def folded(self, name: str, caption: str = "") -> str:
        return (
            f'<div class="numbers"><details><summary>The numbers</summary>'
            f"{self.html(caption)}{self.download(name)}</details></div>"
        )


@dataclass
class Picture:
    """A figure of the page.

    Args:
        name: its file is out/lesson/`name`.png; unique on the page, made of a-z, 0-9, - and _.
        caption: Markdown, below the figure.
        alt: what a reader who does not see it has to know.
        numbers: what it is drawn from, in a table that is folded up below the caption.
    """

    name: str
    figure: Figure
    caption: str
    alt: str
    numbers: Numbers | None = None

    def html(self) -> str:
        numbers = self.numbers.folded(self.name) if self.numbers else ""
        return (
            f'<figure id="picture-{self.name}">\n{self._svg()}\n'
            f"<figcaption>{markdown(self.caption)}{numbers}</figcaption>\n</figure>"
        )

    def save(self, folder: Path) -> Path:
        """Writes `folder`/`name`.png, on white."""
        path = folder / f"{self.name}.png"
        with theme():
            self.figure.savefig(path, facecolor="white")
        return path

    def _svg(self) -> str:
        """The figure as an element of HTML: of the page's colours, as wide as there is room."""
        file = io.StringIO()
        with theme():
            nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
            self.figure.savefig(file, format="svg", facecolor="none", metadata=nothing)
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(
            r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S
        )
        text = text.replace("xlink:href=", "href=")

        # All pictures share the page's ids: an id that is used gets the picture's name, and an
        # unused one goes.
        used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
        names = {a or b for a, b in used}
        text = re.sub(
            r' id="([^"]+)"',
            lambda m: f' id="{self.name}-{m[1]}"' if m[1] in names else "",
            text,
        )
        text = re.sub(r'href="#|url\(#', lambda m: f"{m[0]}{self.name}-", text)

        for colour, variable in SENTINELS.items():
            text = text.replace(colour, variable)
        # Presentation attributes know no variables; matplotlib writes styles, so that none remains.
        width, height = self.figure.get_size_inches()
        head = (
            f'<svg viewBox="0 0 {width * 72:g} {height * 72:g}" role="img" '
            f'aria-label="{html.escape(self.alt)}" style="max-width: {width * 96:.0f}px">'
        )
        text = re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)
        return re.sub(r"\n\s*\n+", "\n", text).strip()


class Section:
    """A chapter of the page.

    Args:
        name: its anchor.
        title: its heading.
        source: Markdown with the title of the source that it follows.
    """

    def __init__(self, name: str, title: str, source: str | None = None) -> None:
        self.name = name
        self.title = title
        self.figures: list[Picture] = []
        self._tables = 0
        self._parts: list[str] = []
        if source:
            self._parts.append(f'<p class="source">{_inline(source)}</p>')

    def text(self, markdown_text: str) -> None:
        """Paragraphs and lists in Markdown; formulas in Unicode."""
        self._parts.append(markdown(markdown_text))

    def differs(self, source: str, markdown_text: str) -> None:
        """A folded note on where a source, named by its title, says something else."""
        self._parts.append(
            f'<details class="differs"><summary>Where {_inline(source)} differs</summary>'
            f"{markdown(markdown_text)}</details>"
        )

    def heading(self, title: str) -> None:
        self._parts.append(f"<h3>{_inline(title)}</h3>")

    def code(self, python: str) -> None:
        self._parts.append(f"<pre><code>{html.escape(cleandoc(python))}</code></pre>")

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        caption: str,
        folded: bool = False,
    ) -> None:
        """A table with a link that saves it as CSV; `folded`: it opens at a click."""
        self._tables += 1
        name = f"{self.name}-{self._tables}"
        numbers = Numbers(columns, rows)
        if folded:
            self._parts.append(numbers.folded(name, caption))
        else:
            table = numbers.html(caption) + numbers.download(name)
            self._parts.append(f'<div class="numbers">{table}</div>')

    def picture(
        self, name: str, figure: Figure, caption: str, alt: str, numbers: Numbers | None = None
    ) -> None:
        """A figure drawn under :func:`theme`, with the arguments of :class:`Picture`."""
        self._parts.append(self._add(Picture(name, figure, caption, alt, numbers)))

    def pictures(self, *pictures: Picture) -> None:
        """Side by side, one below the other on a narrow screen."""
        figures = "\n".join(self._add(picture) for picture in pictures)
        self._parts.append(f'<div class="pictures">\n{figures}\n</div>')

    def html(self, fragment: str) -> None:
        """HTML as it is, for what the reader can move."""
        self._parts.append(fragment)

    def render(self) -> str:
        body = "\n".join(self._parts)
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-title">\n'
            f'<h2 id="{self.name}-title">{_inline(self.title)}</h2>\n{body}\n</section>'
        )

    def _add(self, picture: Picture) -> str:
        if not re.fullmatch(r"[a-z0-9_-]+", picture.name):
            raise ValueError(f"name is {picture.name!r}; it may have a-z, 0-9, - and _ only")
        self.figures.append(picture)
        return picture.html()


def write(sections: Sequence[Section], out: Path, title: str, lead: str, footer: str) -> Path:
    """Writes out/lesson.html, and out/lesson/*.png: its pictures.

    Args:
        lead, footer: Markdown, before the table of contents and at the end.

    Returns:
        The page's path.
    """
    names = [picture.name for section in sections for picture in section.figures]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two pictures are called {', '.join(twice)}; their names must be unique")

    template = string.Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    contents = "\n".join(
        f'<li><a href="#{section.name}">{_inline(section.title)}</a></li>' for section in sections
    )
    text = template.substitute(
        title=html.escape(title),
        description=html.escape(re.sub("<[^>]+>", "", markdown(lead)).strip(), quote=True),
        lead=markdown(lead).replace("<p>", '<p class="lead">', 1),
        contents=contents,
        sections="\n".join(section.render() for section in sections),
        footer=markdown(footer),
    )
    folder = out / "lesson"
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for picture in section.figures:
            picture.save(folder)
    path = out / "lesson.html"
    path.write_text(text, encoding="utf-8")
    return path


def _inline(text: str) -> str:
    return str(_MARKDOWN.renderInline(text))


def _shown(cell: object) -> str:
    """A cell as a reader sees it: 0.6698, −3, 2.06e−09."""
    if isinstance(cell, float):
        text = f"{cell:.4g}"
        return "0" if text == "-0" else text.replace("-", "−")
    return str(cell)
