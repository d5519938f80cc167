"""The documentation holds: links lead somewhere, what is generated is fresh, the site builds, its commands work."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from programs import run_python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "benchmarks/*/README.md", "benchmarks/results/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
NOT_RUN = {"evergrad demo"}  # tests of its own run it


def script(path: Path) -> ModuleType:
    """A script of the documentation, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINKS = script(DOCS / "repository_links.py")


@pytest.mark.check
def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert len(PAGES) > 50
    broken = []
    for page in PAGES:
        for link in LINKS.links((ROOT / page).read_text()):
            target, _, anchor = link.partition("#")
            path = (ROOT / page).parent / target if target else ROOT / page
            if re.match(r"[a-z]+:", link):
                continue
            if not path.exists():
                broken.append(f"{page}: {link}: no such file")
            elif not path.resolve().is_relative_to(ROOT):
                broken.append(f"{page}: {link}: leaves the repository")
            elif anchor and anchor not in LINKS.headings(path.read_text()):
                broken.append(f"{page}: {link}: no such heading")
    assert broken == [], "\n".join(broken)


@pytest.mark.check
def test_headings_are_called_as_forges_call_them() -> None:
    text = "# A job's `end`\n## End\n```\n# no heading\n```\n## End\n## What, *where* and [why](a.md)\n"
    assert LINKS.headings(text) == ["a-jobs-end", "end", "end-1", "what-where-and-why"]
    assert list(LINKS.links("[a](b.md#c) `[x](y)`\n```\n[d](e)\n```\n![f](g.svg)")) == ["b.md#c", "g.svg"]


@pytest.mark.check
def test_the_page_of_the_command_line_is_what_help_says() -> None:
    assert script(DOCS / "make_cli.py").is_fresh(), "docs/cli.md is stale: python docs/make_cli.py"


@pytest.mark.check
def test_the_page_of_the_command_line_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = script(DOCS / "make_cli.py").cli_page()
    for name, value in {"COLUMNS": "20", "TERM": "dumb", "NO_COLOR": "1", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    assert script(DOCS / "make_cli.py").cli_page() == wide
    assert "\x1b" not in wide


@pytest.mark.check
def test_diagrams_are_those_of_their_script_and_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "figures")
    diagrams = script(DOCS / "figures" / "diagrams.py").DIAGRAMS
    shown = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for name, draw in diagrams.items():
        file = DOCS / "figures" / f"diagram-{name}.svg"
        assert file.read_text() == draw().svg(), f"{file.name} is stale: python docs/figures/diagrams.py"
        assert min(int(size) for size in re.findall(r'font-size="(\d+)"', file.read_text())) >= 12
        assert f"figures/{file.name}" in shown, f"{file.name} is on no page"


class _Head(HTMLParser):
    """What a page asks for by itself, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.asked.append(found.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video"):
            self.asked.append(found.get("src", ""))


def built(folder: Path) -> Path:
    """The site, as `make docs` builds it."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'evergrad[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def head_of(path: Path) -> _Head:
    head = _Head()
    head.feed(path.read_text())
    return head


# One test, because building takes longer than looking.
def test_the_site_builds_strictly_is_whole_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    site = built(tmp_path / "site")
    assert {path.stem for path in site.glob("*.html")} >= {path.stem for path in DOCS.glob("*.md")}
    assert not list(site.rglob("*.py")), "scripts of the documentation are no part of the site"
    assert (site / "search" / "search_index.js").exists(), "pages that are read from disk search by it"

    for path in site.rglob("*.html"):
        for asked in head_of(path).asked:
            assert not re.match(r"([a-z]+:)?//", asked), f"{path.name} asks for {asked}"
    for path in (site / "assets").rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", path.read_text()), path.name

    copies = [link for link in head_of(site / "checkpointing.html").links if link.startswith("repository/")]
    assert any(link.startswith("repository/benchmarks/") for link in copies)
    assert any(link.startswith("repository/src/") for link in copies)
    for link in copies:
        assert (site / link.partition("#")[0]).is_file(), link


def written(page: Path, folder: Path) -> dict[str, str]:
    """The files of a page: blocks whose first line names one."""
    blocks = re.findall(r"```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)```", page.read_text(), re.S)
    for name, text in blocks:
        (folder / name).write_text(text)
    return dict(blocks)


def test_the_commands_of_the_quickstart_print_what_it_says(tmp_path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text()
    written(DOCS / "quickstart.md", tmp_path)
    environment = os.environ | {"EVERGRAD_SHM": str(tmp_path), "EVERGRAD_LINGER": "0", "COLUMNS": "120"}
    ran = 0
    # In the order of the page: what is not in a file runs where it stands.
    for kind, text in re.findall(r"```(python|console)\n(.*?)```", page, re.S):
        if kind == "python" and not text.startswith("# "):
            code = f"import torch, evergrad as eg\nfrom torch import nn\n{text}"
            done = run_python("-c", code, cwd=tmp_path, env=environment)
            assert done.returncode == 0, done.stderr
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", text if kind == "console" else "", re.M):
            line, _, note = (part.strip() for part in command.partition("  #"))
            words = shlex.split(line)
            if words[0] != "evergrad" or line in NOT_RUN:
                continue
            done = run_python("-m", *words, cwd=tmp_path, env=environment)
            said = done.stdout + done.stderr
            assert done.returncode == (1 if "exit code 1" in note else 0), said
            found = [" ".join(each.split()) for each in said.splitlines()]
            for expected in shown.splitlines():
                pattern = r".*".join(re.escape(part.strip()) for part in " ".join(expected.split()).split("…"))
                pattern = pattern.replace(r".*", r"\s?.*\s?")
                assert any(re.fullmatch(pattern, each) for each in found), f"{line}: {expected}\n{said}"
            ran += 1
    assert ran >= 9


@pytest.mark.parametrize(
    ("suite", "passed"), [("test_my_format.py", 10), ("test_my_tier.py", 7), ("test_my_executor.py", 2)]
)
def test_what_the_page_on_extending_shows_keeps_its_contract(suite: str, passed: int, tmp_path: Path) -> None:
    assert suite in written(DOCS / "extending.md", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (entry,) = re.findall(r"```toml\n\[project\.entry-points.*\]\n(.*)\n```", (DOCS / "extending.md").read_text())
    (installed := tmp_path / "mine-1.0.dist-info").mkdir()
    (installed / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[evergrad.formats]\n{entry.replace(chr(34), '')}\n")
    # Of the executor's, those that kill nothing: killing is the same for the one that it wraps, and tested there.
    chosen = ["-k", "collected_once or told_with_its_text"] if "executor" in suite else []
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen, suite, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) passed", done.stdout)
    assert count is not None
    assert int(count[1]) >= passed, done.stdout


# Figures


COMPARED = [
    line.split("|")[1:-1]
    for line in (ROOT / "README.md").read_text().partition("## Beside others")[2].partition("\n## ")[0].splitlines()
    if "benchmarks/results/" in line
]


@pytest.mark.check
@pytest.mark.parametrize(("what", "ours", "others", "measured"), COMPARED, ids=[row[0].strip(" …") for row in COMPARED])
def test_every_figure_beside_others_is_in_the_results_with_its_command(
    what: str, ours: str, others: str, measured: str
) -> None:
    (path,) = re.findall(r"\]\((benchmarks/results/[^)]*)\)", measured)
    results = (ROOT / path).read_text()
    assert re.search(r"^- command: `python benchmarks/\w+/main.py", results, re.MULTILINE), path
    figures = re.findall(r"[\d.,]*\d(?: (?:µs|ms|s)\b)?(?=\s*(?:·|,|$))", f"{ours.strip()} · {others.strip()}")
    assert len(figures) > others.count("·") + 1, (what, figures)
    for figure in figures:
        assert re.search(rf"\| {re.escape(figure)}(?: \(| \|)", results), f"{what}: {figure} is not in {path}"
