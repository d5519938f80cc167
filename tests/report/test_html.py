"""Pages in a real browser: nothing leaves, nothing hostile runs, everything draws, sorts, fits and prints."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from browsing import OpenPage

from evergrad._files import replacing
from evergrad.errors import FileAccessError, UsageError
from evergrad.report import html
from evergrad.report.html import page_html, write_page
from evergrad.report.page_model import (
    PALETTE,
    Commands,
    DataTable,
    Facts,
    Figure,
    Prose,
    ReportPage,
    Section,
    TableCell,
    TableColumn,
)

BAD = "</script><img src=https://example.org/x onerror=alert(1)>\"'`${alert(1)}"


def figure(label: str = "line", **given: str) -> Figure:
    """A small one."""
    return Figure(label, [{"type": "scatter", "x": [1, 2, 3], "y": [1, float("nan"), 3], "name": "a", **given}], {})


def table(*rows: tuple[str, float | None]) -> DataTable:
    """Names and numbers."""
    return DataTable(
        [TableColumn("name"), TableColumn("value", "number", "what it is")],
        [[TableCell(a), TableCell(str(b), b)] for a, b in rows],
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose every text tries something."""
    wide = Figure("<map>", [{"type": "heatmap", "z": [[1, 2], [3, 4]], "x": [BAD, "b"]}], {"title": {"text": BAD}}, BAD)
    sections = [
        Section(BAD, [Prose(BAD), figure(BAD, name="<a href='https://example.org'>link</a>"), wide], anchor=BAD),
        Section(
            "Table",
            [
                DataTable(
                    [TableColumn(BAD, help=BAD), TableColumn("value", "number")],
                    [
                        [TableCell(BAD), TableCell("10", 10)],
                    ],
                    BAD,
                )
            ],
        ),
        Section("Folded", [figure("z"), Facts([(BAD, "long" * 100)]), Commands([(BAD, f"echo {BAD}")])], folded=True),
    ]
    page = ReportPage(f"Title {BAD}", "test", BAD, [BAD, "**bold** and `code`"], sections, BAD)
    return write_page(page, tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A page with a table alone: there at once."""
    rows = [("a", 10.0), ("b", 9.0), ("c", None), ("d", float("inf"))]
    return write_page(ReportPage("t", "k", "q", ["a"], [Section("Table", [table(*rows)])]), tmp_path / "plain.html")


def test_hostile_texts_are_only_texts_and_no_request_leaves(hostile: Path, open_page: OpenPage) -> None:
    opened = open_page(hostile)
    assert opened.drawn() == 3
    page = opened.page
    assert page.title() == f"Title {BAD}"
    assert page.locator("body img").count() == 0
    assert page.locator("a[href^='http'], svg a").count() == 0
    assert page.locator("h2").first.inner_text() == BAD
    assert page.locator("pre code").first.text_content() == f"echo {BAD}"
    assert (opened.errors, opened.requests) == ([], [])


def test_the_policy_lets_nothing_out_and_no_other_script_run(plain: Path, open_page: OpenPage) -> None:
    opened = open_page(plain)
    tried = opened.page.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          const image = new Image();
          image.src = "https://example.org/image";
          document.body.append(image);
          const fetched = await fetch("https://example.org/data").then(() => "sent", () => "refused");
          return [fetched, window.ran === undefined];
        }"""
    )
    assert tried == ["refused", True]
    assert opened.requests == []


def test_tables_sort_by_click_and_key_and_what_has_no_value_stays_last(plain: Path, open_page: OpenPage) -> None:
    page = open_page(plain).page
    head = page.locator("#table th").nth(1)

    def values() -> list[str]:
        return [str(text) for text in page.locator("#table tbody td:nth-child(2)").all_inner_texts()]

    head.locator("button").click()
    assert (values(), head.get_attribute("aria-sort")) == (["9.0", "10.0", "inf", "None"], "ascending")
    head.locator("button").press("Enter")
    assert (values(), head.get_attribute("aria-sort")) == (["inf", "10.0", "9.0", "None"], "descending")
    page.locator("#table th").first.locator("button").click()
    assert head.get_attribute("aria-sort") is None
    assert page.locator("#table tbody td:first-child").last.inner_text() == "d"


def test_the_button_switches_light_and_dark_and_it_fits_a_telephone(hostile: Path, open_page: OpenPage) -> None:
    opened = open_page(hostile, dark=True)
    opened.drawn()
    page = opened.page
    colour = "getComputedStyle(document.querySelector('.canvas .xtick text')).fill"
    dark = page.evaluate(colour)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    page.locator("#theme").click()
    opened.until(f"{colour} !== '{dark}'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 390, "height": 800})
    opened.until("document.querySelector('.canvas svg').getBoundingClientRect().width < 390")
    assert opened.overflow() == 0
    assert opened.errors == []


def test_it_prints_light_with_every_section_open(tmp_path: Path, open_page: OpenPage) -> None:
    many = DataTable([TableColumn(f"column {place}") for place in range(30)], [[TableCell("word")] * 30])
    sections = [Section("Seen", [figure("a"), many]), Section("Folded away", [figure("b")], folded=True)]
    path = write_page(ReportPage("Printed", "test", "?", ["Yes."], sections), tmp_path / "page.html")
    opened = open_page(path, width=794, dark=True)
    opened.drawn()
    opened.page.emulate_media(media="print")
    printed = opened.page.pdf(tagged=True, outline=True)
    assert [b"Seen" in printed, b"Folded away" in printed] == [True, True]
    opened.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.page.locator("details:not([open])").count() == 0
    assert not opened.page.locator("#theme").is_visible()
    assert opened.overflow() <= 0
    opened.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator("details:not([open])").count() == 1


def test_plotly_is_in_a_page_once_or_not_at_all() -> None:
    mark = "plotly.js v"
    three = page_html(ReportPage("t", "k", "q", ["a"], [Section("s", [figure("a"), figure("b"), figure("c")])]))
    none = page_html(ReportPage("t", "k", "q", ["a"], [Section("s", [table(("a", 1.0))])]))
    assert three.count(mark) == 1
    assert mark not in none
    assert len(none) < 40_000
    assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", none)


def test_missing_plotly_is_one_line_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[report\]"):
        html.plotly_script()
    assert "<table" in page_html(ReportPage("t", "k", "q", ["a"], [Section("s", [table(("a", 1.0))])]))


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(ReportPage("old", "k", "q", ["a"]), path)
    torn = DataTable([TableColumn("one"), TableColumn("two")], [[TableCell("alone")]])
    with pytest.raises(ValueError, match="zip"):
        write_page(ReportPage("new", "k", "q", ["a"], [Section("s", [torn])]), path)
    assert "<title>old</title>" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_only_a_page_or_an_empty_file_is_overwritten(tmp_path: Path) -> None:
    page = ReportPage("new", "k", "q", ["a"])
    kept, empty, old = (tmp_path / name for name in ("timeline.jsonl", "empty", "old.html"))
    kept.write_text('{"event": "begin"}\n')
    empty.touch()
    old.write_text("\ufeff<!DOCTYPE HTML>\n<p>old")
    with pytest.raises(UsageError, match=r"timeline\.jsonl: is no page, and is not overwritten by one"):
        write_page(page, kept)
    assert kept.read_text() == '{"event": "begin"}\n'
    for path in (empty, old):
        assert "<title>new</title>" in write_page(page, path).read_text()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe"])
def test_what_is_no_file_is_not_replaced_by_a_page(kind: str, tmp_path: Path) -> None:
    """A pipe stands for devices, which only root can make."""
    path = tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    if kind.startswith("link"):
        path, aim = tmp_path / "link", path
        path.symlink_to(aim)
    before = path.stat()
    with pytest.raises(UsageError, match="is no file"):
        write_page(ReportPage("t", "k", "q", ["a"]), path)
    with pytest.raises(FileAccessError, match="is no file"), replacing(path):
        pass
    assert path.stat() == before
    assert not list(tmp_path.glob(".*"))


def test_colours_can_be_seen_on_light_and_on_dark() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name, colour in PALETTE.items():
        for ground in ("#ffffff", "#14171c"):
            low, high = sorted((luminance(colour), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 3, f"{name} on {ground}"


@pytest.mark.parametrize("error", [ImportError("blocked"), ModuleNotFoundError("blocked"), ValueError("no spec")])
def test_plotly_that_an_import_hook_forbids_is_missing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocker:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "plotly":
                raise error

    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    assert "figures need plotly, which is not installed" in html.missing_plotly()
