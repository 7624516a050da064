"""The lesson's page: well-formed, complete in itself, and seen by a browser at three widths."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure

from _variants import run_python
from examples.lesson import page
from examples.lesson.page import Numbers, Picture, Section

pytestmark = pytest.mark.slow  # runs the lesson, and a browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")

# https://html.spec.whatwg.org/multipage/syntax.html#void-elements
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick run of the lesson, as a user runs it."""
    folder = tmp_path_factory.mktemp("lesson")
    command = ["-m", "examples.lesson", "--quick", "--out", str(folder)]
    # One thread: the threads of several busy processes would wait for each other.
    printed = run_python(*command, COLUMNS="120", OMP_NUM_THREADS="1")
    assert "All checks hold" in printed
    assert str(folder / "lesson.html") in printed
    return folder


@pytest.fixture(scope="module")
def text(out: Path) -> str:
    return (out / "lesson.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Elements with their attributes; fails at an end tag that closes another element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parents: list[tuple[str, ...]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.elements.append((tag, dict(attrs)))
        self.parents.append(tuple(self._open))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.parents.append(tuple(self._open))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing, at {self.getpos()}"
        assert self._open.pop() == tag, f"</{tag}> closes another element, at {self.getpos()}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


class TestHtml:
    def test_tags_are_balanced(self, text: str) -> None:
        reader = Reader(text)
        assert text.startswith("<!DOCTYPE html>")
        assert reader.all("html") == [{"lang": "en"}]
        assert len(reader.all("title")) == len(reader.all("h1")) == len(reader.all("main")) == 1
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.all(
            "meta"
        )

    def test_the_reader_sees_what_is_not_balanced(self) -> None:
        for wrong in ("<p><b>x</p></b>", "<div>", "</p>", '<a id="x" id="y"></a>'):
            with pytest.raises(AssertionError):
                Reader(wrong)

    def test_ids_are_unique_and_those_that_are_meant_exist(self, text: str) -> None:
        reader = Reader(text)
        ids = [a["id"] for _, a in reader.elements if "id" in a]
        assert [i for i, n in Counter(ids).items() if n > 1] == []
        meant = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
        meant_by_name = [
            name
            for _, a in reader.elements
            for key in ("for", "aria-labelledby")
            for name in (a.get(key) or "").split()
        ]
        assert {a or b for a, b in meant} | set(meant_by_name) <= set(ids)

    def test_nothing_is_loaded_from_elsewhere(self, text: str) -> None:
        reader = Reader(text)
        policy = [m["content"] for m in reader.all("meta") if "http-equiv" in m]
        assert policy == [
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
            "img-src data:"
        ]
        for tag, attributes in reader.elements:
            for name in ("src", "srcset", "href", "xlink:href", "action", "poster"):
                address = attributes.get(name) or "#"
                # a link that the reader may follow loads nothing by itself
                allowed = ("#", "data:", "https://") if tag == "a" else ("#", "data:")
                assert address.startswith(allowed), (tag, address[:60])
        assert "@import" not in text
        assert re.findall(r"url\((?!#|data:)", text) == []

    def test_pictures_have_labels_and_captions(self, text: str) -> None:
        reader = Reader(text)
        labels = [svg.get("aria-label") or "" for svg in reader.all("svg")]
        assert len(labels) > 20
        assert all(len(label) > 20 for label in labels)
        assert all(svg["role"] == "img" for svg in reader.all("svg"))
        # images are parts of the pictures: the colours of heat maps
        for (tag, _), parents in zip(reader.elements, reader.parents, strict=True):
            if tag in ("img", "image"):
                assert "svg" in parents
        assert len(reader.all("figcaption")) == len(reader.all("figure"))
        assert text.count("<figcaption></figcaption>") == 0
        for (tag, _), parents in zip(reader.elements, reader.parents, strict=True):
            if tag == "figcaption":
                assert parents[-1] == "figure"

    def test_contents_list_every_chapter(self, text: str) -> None:
        reader = Reader(text)
        sections = [s["id"] for s in reader.all("section")]
        links = [
            a["href"]
            for (tag, a), parents in zip(reader.elements, reader.parents, strict=True)
            if tag == "a" and "nav" in parents
        ]
        assert links == [f"#{name}" for name in sections]
        assert sections[:2] == ["words", "four-tokens"]

    def test_sources_are_named_and_listed(self, text: str) -> None:
        prose = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
        assert re.findall(r"\bdocuments?\b", prose) == []
        named = re.findall(r"<em>(.*?)</em>", " ".join(re.findall(r'"source">After .*', prose)))
        listed = prose[prose.index('<section id="sources"') :]
        assert len(set(named)) == 5
        assert all(f"<em>{title}</em>" in listed for title in named)

    def test_pictures_take_their_colours_from_the_page(self, text: str) -> None:
        for colour in page.SENTINELS:
            assert colour not in text
        assert text.count("var(--ink)") > 100

    def test_downloads_hold_the_numbers(self, text: str) -> None:
        reader = Reader(text)
        files = [a for a in reader.all("a") if "download" in a]
        assert len(files) > 20
        names = [a["download"] for a in files]
        assert len(set(names)) == len(names)
        for a in files:
            address = a["href"] or ""
            rows = list(csv.reader(io.StringIO(unquote(address.partition(",")[2]))))
            assert len(rows) > 1
            assert len({len(row) for row in rows}) == 1, a["download"]

    def test_pngs_are_there_and_not_blank(self, out: Path, text: str) -> None:
        names = re.findall(r'<figure id="picture-([^"]+)"', text)
        files = sorted((out / "lesson").glob("*.png"))
        assert sorted(path.stem for path in files) == sorted(names)
        for path in files:
            pixels = matplotlib.image.imread(path)
            assert min(pixels.shape[:2]) > 200, path
            assert pixels[..., :3].std() > 0.03, f"{path} is nearly blank"
            assert pixels[0, 0, :3].tolist() == [1, 1, 1], f"{path} is not on white"


class TestSections:
    @staticmethod
    def figure() -> Figure:
        with page.theme():
            figure = Figure(figsize=(3, 2), layout="constrained")
            figure.subplots().plot([1, 2], label="ü < &")
            figure.axes[0].legend()
        return figure

    def test_two_pictures_of_one_name_are_refused(self, tmp_path: Path) -> None:
        section = Section("a", "A")
        section.picture("x", self.figure(), "x", "x")
        section.picture("x", self.figure(), "x", "x")
        with pytest.raises(ValueError, match="two pictures are called x"):
            page.write([section], tmp_path, "T", "L", "F")

    def test_a_name_that_is_no_file_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"name is '\.\./x'"):
            Section("a", "A").picture("../x", self.figure(), "x", "x")

    def test_special_characters(self, tmp_path: Path) -> None:
        section = Section("a", 'A < B & "C"', "After *D & E*")
        section.text('x < y & "z"')
        section.code("if x < y & z: pass")
        section.table(["a <", "b"], [["<script>", 'with, comma and "quotes"']], "a & b")
        alt = 'x < "y" & z'
        section.pictures(
            Picture("x", self.figure(), "x < y", alt),
        )
        path = page.write([section], tmp_path, "A < B & C", "Lead & more", "")
        text = path.read_text(encoding="utf-8")
        reader = Reader(text)
        assert [svg["aria-label"] for svg in reader.all("svg")] == [alt]
        assert "<td>&lt;script&gt;</td>" in text
        assert "if x &lt; y &amp; z: pass" in text
        address = next(a["href"] or "" for a in reader.all("a") if "download" in a)
        rows = list(csv.reader(io.StringIO(unquote(address.partition(",")[2]))))
        assert rows == [["a <", "b"], ["<script>", 'with, comma and "quotes"']]

    def test_where_a_source_differs_is_folded(self) -> None:
        section = Section("a", "A")
        section.differs("*B & C*", "x < *y*")
        text = section.render()
        (details,) = Reader(text).all("details")
        assert "open" not in details
        assert "<summary>Where <em>B &amp; C</em> differs</summary>" in text
        assert "<p>x &lt; <em>y</em></p>" in text

    def test_tables_show_four_digits_and_store_all(self) -> None:
        numbers = Numbers.matrix(torch.tensor([[-1 / 3]], dtype=torch.float64), ["q"], ["k"])
        assert "<td>−0.3333</td>" in numbers.html("")
        assert repr(-1 / 3) in unquote(numbers.download("x"))

    def test_a_matrix_with_too_few_names_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"values are \[2, 2\] for 2 queries and 1 keys"):
            Numbers.matrix(torch.zeros(2, 2), ["a", "b"], ["c"])

    def test_equal_figures_are_equal_text(self) -> None:
        first, second = (Picture("x", self.figure(), "x", "x").html() for _ in range(2))
        assert first == second


# In the page: boxes of the groups that are texts of a figure. Those that overlap, by pairs.
OVERLAPS = """
() => [...document.querySelectorAll("figure[id^=picture-]")].flatMap((figure) => {
  const texts = [...figure.querySelectorAll("svg g")].filter(
    (g) => [...g.children].some(
      (c) => c.tagName === "use" && c.getAttribute("href").includes("DejaVu")));
  const boxes = texts.map((g) => g.getBoundingClientRect()).filter((b) => b.width && b.height);
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [boxes[i], boxes[j]];
    const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    const least = Math.min(a.width * a.height, b.width * b.height);
    if (width > 0 && height > 0 && width * height > 0.15 * least)
      found.push(`${figure.id}: ${i} and ${j}`);
  }
  return found;
})
"""

# Texts of a figure that reach out of it by more than a pixel.
CUT_OFF = """
() => [...document.querySelectorAll("figure[id^=picture-] svg")].flatMap((svg) => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("use")].map((u) => u.getBoundingClientRect()).filter(
    (b) => b.width && (b.left < room.left - 1 || b.right > room.right + 1
      || b.top < room.top - 1 || b.bottom > room.bottom + 1)
  ).map(() => svg.closest("figure").id);
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium. Where there is none, what it would have seen is not run."""
    if CHROMIUM is None:
        pytest.skip("not run: there is no Chromium (on Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="not run: no playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, out: Path) -> Iterator[Any]:
    """Opens the page; fails at the end if it said an error or asked for anything else."""
    contexts, said, asked = [], [], []

    def open_page(width: int, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((out / "lesson.html").as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    page_itself = (out / "lesson.html").as_uri()
    assert [url[:80] for url in asked if url != page_itself and not url.startswith("data:")] == []


def test_the_browser_sees_texts_that_overlap_or_are_cut_off(browser: Any, tmp_path: Path) -> None:
    section = Section("a", "A")
    for name, texts in {
        "apart": [(0.2, 0.2), (0.2, 0.8)],
        "over-each-other": [(0.2, 0.2), (0.25, 0.22)],
        "cut-off": [(0.2, 0.2), (0.95, 0.8)],
    }.items():
        with page.theme():
            figure = Figure(figsize=(3, 2))
            for x, y in texts:
                figure.text(x, y, "a long text")
        section.picture(name, figure, "x", "x")
    tab = browser.new_page()
    tab.goto(page.write([section], tmp_path, "T", "L", "F").as_uri())
    assert tab.evaluate(OVERLAPS) == ["picture-over-each-other: 1 and 0"]
    assert set(tab.evaluate(CUT_OFF)) == {"picture-cut-off"}
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
class TestLooks:
    def test_nothing_is_wider_than_the_screen(self, visit: Any, width: int, scheme: str) -> None:
        tab = visit(width, scheme)
        for _ in range(2):
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            # again with every table unfolded
            tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")

    def test_texts_in_figures_are_apart_and_whole(
        self, visit: Any, width: int, scheme: str
    ) -> None:
        tab = visit(width, scheme)
        assert tab.evaluate(OVERLAPS) == []
        assert tab.evaluate(CUT_OFF) == []

    def test_text_stands_out(self, visit: Any, width: int, scheme: str) -> None:
        """WCAG 2.1, 1.4.3: a contrast of 4.5 at least, for what is text and what is drawn as it."""
        tab = visit(width, scheme)
        style = (
            "(selector, property) => getComputedStyle(document.querySelector(selector))[property]"
        )
        paper = tab.evaluate(f"({style})('body', 'backgroundColor')")
        for selector in ("p", "figcaption", "nav a", ".source", "#theme"):
            ink = tab.evaluate(f"({style})('{selector}', 'color')")
            assert contrast(ink, paper) >= 4.5, (selector, ink, paper)
        drawn = tab.evaluate(f"({style})('figure svg g[style*=\"--ink\"]', 'fill')")
        assert contrast(drawn, paper) >= 4.5


def contrast(*colours: str) -> float:
    """The contrast of two rgb(...) colours, after WCAG 2.1."""
    light = []
    for colour in colours:
        parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in parts]
        light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(light) + 0.05) / (min(light) + 0.05)


class TestResponds:
    def test_the_switch_is_remembered(self, visit: Any) -> None:
        tab = visit(1280, "light")
        background = "getComputedStyle(document.body).backgroundColor"
        light = tab.evaluate(background)
        tab.click("#theme")
        dark = tab.evaluate(background)
        assert dark != light
        assert tab.inner_text("#theme") == "Light"
        tab.reload()
        assert tab.evaluate(background) == dark
        tab.click("#theme")
        assert tab.evaluate(background) == light

    def test_the_slider_shows_what_was_computed(self, visit: Any) -> None:
        tab = visit(360)
        shown = ".temper b"
        assert tab.locator(shown).all_inner_texts() == ["0.6652", "0.2447", "0.0900"]
        tab.locator("#temper-factor").press("End")
        assert tab.locator(shown).all_inner_texts() == ["1.0000", "0.0000", "0.0000"]
        assert tab.inner_text("#temper-shown") == "10"
        tab.locator("#temper-factor").press("Home")
        assert tab.locator(shown).all_inner_texts() == ["0.3333"] * 3

    def test_tables_unfold_and_are_saved(self, visit: Any, tmp_path: Path) -> None:
        tab = visit(768)
        folded = tab.locator("#picture-four-tokens-weights details")
        assert not folded.locator("table").is_visible()
        folded.locator("summary").click()
        assert folded.locator("table").is_visible()
        with tab.expect_download() as download:
            folded.locator("a.download").click()
        download.value.save_as(tmp_path / "weights.csv")
        rows = list(csv.reader((tmp_path / "weights.csv").open(encoding="utf-8")))
        assert rows[0] == ["query \\ key", "Token-1", "Token-2", "Token-3", "Token-4", "sum"]
        assert sum(float(x) for x in rows[1][1:5]) == pytest.approx(1)

    def test_the_contents_mark_what_is_read(self, visit: Any) -> None:
        tab = visit(1280)
        tab.click('nav a[href="#lookup"]')
        tab.locator('nav a[aria-current][href="#lookup"]').wait_for(timeout=5000)
