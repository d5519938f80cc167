"""The page of a job's versions: what is wrong comes first, and only what was looked at is claimed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.catalogue.lineage import draw_svg
from evergrad.cli import main
from evergrad.report.checkpoints_page import JobVersions, checkpoints_answer, checkpoints_page, problems, survey_job
from evergrad.report.html import page_html, write_page
from evergrad.report.page_model import Figure

OpenPage = Callable[..., Any]


def save(folder: Path, *attempts: tuple[int, ...], source: Path | None = None, tiers: Any = None) -> Path:
    """A job whose attempts save these steps; its disk keeps three."""
    for steps in attempts:
        with eg.Checkpointer(folder, tiers=tiers or [eg.Local(keep=3)], agent=False) as ck:
            ck.restore({"w": torch.zeros(8), "step": 0}, source=source)
            for step in steps:
                ck.save(step, {"w": torch.full((8,), float(step)), "step": step}).wait()
    return folder


@pytest.fixture
def run(tmp_path: Path, shm: Path) -> Path:
    """Two attempts: steps 1 to 4, then from 4 on step 5."""
    return save(tmp_path / "run", (1, 2, 3, 4), (5,))


def seen(where: Path | str) -> JobVersions:
    return survey_job(Catalogue(where))


def figures(found: JobVersions) -> dict[str, Figure]:
    blocks = [block for section in checkpoints_page(found, "").sections for block in section.blocks]
    return {block.name: block for block in blocks if isinstance(block, Figure)}


def points(figure: Figure, name: str) -> list[tuple[Any, Any]]:
    return [
        point
        for trace in figure.traces
        if trace.get("name") == name
        for point in zip(trace["x"], trace["y"], strict=True)
    ]


def test_the_answer_counts_what_can_be_restored_and_what_is_gone(run: Path) -> None:
    told = checkpoints_answer(seen(run))
    assert told[0] == ("**5 versions in 2 attempts; 3 can be restored, the newest is step 5 (attempt 2) in local.**")
    assert any("nobody has checked their digests" in line for line in told)
    assert "2 versions are gone, and known from the history." in told


def test_a_command_in_a_sentence_can_be_pasted(run: Path) -> None:
    told = " ".join(checkpoints_answer(dataclasses.replace(seen(run), where="runs/my job; ls")))
    assert "`evergrad checkpoints verify 'runs/my job; ls'` does." in told


def test_what_is_damaged_comes_right_after_the_head(run: Path) -> None:
    shard = next(run.glob("local/*/*/v0000000004-01/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    assert main(["checkpoints", "verify", str(run)]) == 1
    found = seen(run)
    assert checkpoints_answer(found)[1].startswith("v0000000004-01 is damaged in local: ")
    assert checkpoints_page(found, "").sections[0].title == "What is wrong"
    assert points(figures(found)["versions-and-tiers"], "damaged, when last checked") == [(3, "local")]
    assert checkpoints_answer(found)[1].endswith(", and no other tier has all of it.")
    assert "2 can be restored" in checkpoints_answer(found)[0]
    assert "2 of 2 were found intact when last checked." in checkpoints_answer(found)


def test_versions_stand_in_the_rows_of_the_tiers_that_hold_them(run: Path) -> None:
    Catalogue(run).pins.tag(Version(3, 1), "best")
    figure = figures(seen(run))["versions-and-tiers"]
    assert points(figure, "whole") == [(2, "local"), (3, "local"), (4, "local")]
    assert points(figure, "gone from every tier") == [(0, "saved"), (1, "saved")]
    assert points(figure, "pinned or tagged") == [(2, "saved")]
    assert figure.layout["xaxis"]["ticktext"] == ["1·1", "2·1", "3·1", "4·1", "5·2"]


def test_a_newest_version_that_is_not_whole_is_said_first(run: Path) -> None:
    for path in run.glob("local/*/*/v0000000005-02/*"):
        path.unlink()
    told = checkpoints_answer(seen(run))
    assert told[1] == "The newest version, step 5 (attempt 2), is gone."
    assert "the newest is step 4 (attempt 1)" in told[0]


def test_lineage_leads_to_the_job_that_it_came_from(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", (9, 10), source=run)
    found = seen(other)
    page = page_html(checkpoints_page(found, ""))
    drawing = draw_svg(found.lineage)  # as 'evergrad checkpoints lineage --picture' writes it
    assert drawing in page
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert [text.split(" · ")[-1] for text in texts if "attempt" in text and "version" not in text] == [
        "attempt 1",
        "attempt 2",
        "attempt 1",
    ]
    assert {"5", "9", "10"} <= set(texts)
    assert drawing.count("<path ") == len([*found.lineage.edges()]) == 6


def test_a_long_lineage_shows_the_newest_versions(run: Path) -> None:
    whole = seen(run).lineage
    newest = whole.newest(3, 1)
    assert [node.version for node in newest.nodes] == [Version(5, 2)]
    assert [*newest.edges()] == []
    newest = whole.newest(3, 2)
    assert [node.version.step for node in newest.nodes] == [5, 4, 3]
    assert [(child.version.step, parent.version.step) for child, parent in newest.edges()] == [(5, 4), (4, 3)]
    assert draw_svg(newest).count("<path ") == 2
    assert whole.newest(99, 99) == whole


def test_a_job_without_versions_says_so(tmp_path: Path, shm: Path) -> None:
    found = seen(save(tmp_path / "run", ()))
    assert checkpoints_answer(found)[0].endswith("has no version yet.**")
    assert problems(found) == []
    assert len(page_html(checkpoints_page(found, ""))) < 100_000  # no figure, no plotly


def test_tags_stay_texts_in_the_page(run: Path) -> None:
    (run / "catalogue").mkdir(exist_ok=True)
    line = {"schema_version": 1, "version": "v0000000007-03", "rank": 0, "world_size": 1, "size": 1, "digest": "",
            "time": "<img src=x>", "parent": "<img src=y>/v0000000001-01", "meta": {}, "node": "n"}  # fmt: skip
    (run / "catalogue" / "x.jsonl").write_text(json.dumps(line) + "\n")
    made = page_html(checkpoints_page(seen(run), "</footer><img>"))
    assert "<img" not in made
    assert "&lt;img src=x&gt;" in made


def test_the_verb_writes_the_page_and_says_what_is_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["versions"]), found["problems"]) == (5, [])
    assert Path(found["page"]).read_text().endswith("</html>\n")
    assert main(["checkpoints", "report", str(run), "--out", str(tmp_path / "x.html")]) == 0
    head, last = capsys.readouterr().out.splitlines()
    assert head.startswith("5 versions in 2 attempts")
    assert "x.html" in last


def test_a_tier_by_its_url_needs_a_place_for_the_page(
    tmp_path: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    save(tmp_path / "run", (1,), tiers=[eg.Local(), eg.Persistent(url)])
    assert main(["checkpoints", "report", url]) == 2
    assert "Name a file: --out FILE" in capsys.readouterr().err
    assert main(["checkpoints", "report", url, "--out", str(tmp_path / "x.html")]) == 0
    assert any("by a tier's URL" in line for line in checkpoints_answer(seen(url)))


def test_a_browser_draws_tiers_lineage_and_sizes(run: Path, tmp_path: Path, open_page: OpenPage) -> None:
    Catalogue(run).pins.tag(Version(3, 1), "best")
    page = write_page(checkpoints_page(seen(run), "made by a test"), tmp_path / "x.html")
    opened = open_page(page, width=390)
    assert opened.drawn() == len(figures(seen(run)))
    assert (opened.errors, opened.requests, opened.overflow()) == ([], [], 0)
    steps = "#versions tbody td:nth-child(2)"
    opened.page.click("#versions th:nth-child(2) button")
    assert opened.page.locator(steps).all_text_contents() == ["1", "2", "3", "4", "5"]
