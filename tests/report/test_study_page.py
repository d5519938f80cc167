"""The report of a study: the answer first, only what the data says, every figure drawn, and no trial too many."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import OpenPage
from study_folders import GOLDEN, See, made_study, seen_of

from evergrad.cli import main
from evergrad.errors import UsageError
from evergrad.report import study_data as data_module
from evergrad.report.html import escape_markup, inline_html, page_html, plain_text, write_page
from evergrad.report.page_model import Commands, DataTable, Figure, Prose, ReportPage
from evergrad.report.study_data import _all, published_for, study_data
from evergrad.report.study_page import study_page
from evergrad.study.comparisons import compare_cells
from evergrad.study.folder import StudyFolder
from evergrad.study.plan_files import gallery
from evergrad.study.results import results_of
from evergrad.study.tables import PUBLISHED
from evergrad.study.trials import Observation, Series, Trial, TrialEnd

HOSTILE = """
study = "mine"
title = "<script>alert(1)</script>"
question = "</script> & what?"
seed = 3

[axes]
flips = [1, 4]
model = ["alexnet"]

[training]
checkpoint = 1
epochs = 1
"""


def blocks(page: ReportPage, kind: type) -> list[object]:
    """All of that kind."""
    return [block for section in page.sections for block in section.blocks if isinstance(block, kind)]


def section(page: ReportPage, anchor: str) -> str:
    """The HTML of one section, without figures."""
    found = re.search(rf'<section id="{anchor}">(.*?)</section>', page_html(page), re.S)
    assert found, [one.anchor for one in page.sections]
    return found[1]


@pytest.fixture(scope="module")
def nev(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole study of the gallery with published figures."""
    return made_study(tmp_path_factory.mktemp("nev") / "study", "bitflip-nev", trainings=20)


def test_the_answer_is_in_words_and_says_what_the_tables_say(nev: Path) -> None:
    page = study_page(nev)
    cells = {(cell.axes["model"], cell.axes["flips"]): cell for cell in results_of(nev).cells}
    low, high = (PUBLISHED["nev"][1](cells["resnet50", flips], results_of(nev)) for flips in (1, 1000))
    assert low is not None
    assert high is not None
    assert f"{low.value:.1f} % [{low.low:.1f}, {low.high:.1f}] at 1 flip" in page.answer[0]
    assert f"{high.value:.1f} % [{high.low:.1f}, {high.high:.1f}] at 1000 flips" in page.answer[0]
    assert "a rise is told for resnet50; vgg16; alexnet" in page.answer[2]
    assert "Told apart after Holm's correction" in page.answer[3]
    tests = len(compare_cells(results_of(nev)))
    assert f"of {tests} comparisons (N-EV and RWC of neighbouring cells)" in page.answer[3]
    assert not any("complete" in part for part in page.answer)


def test_an_axis_that_goes_down_in_the_plan_is_told_from_its_lowest_place(tmp_path: Path) -> None:
    downwards = HOSTILE.replace("seed = 3", 'seed = 3\nrows = "flips"').replace("[1, 4]", "[1000, 100, 10, 1]")
    answer = study_page(made_study(tmp_path / "study", downwards, trainings=20)).answer
    first, _, last = answer[0].partition(" and ")
    assert first.endswith("at 1 flip")
    assert "at 1000 flips" in last
    assert "a rise is told for all trainings" in answer[2]


def test_a_study_in_which_nothing_was_finished_does_not_read_as_harmless(tmp_path: Path) -> None:
    ends = {0: TrialEnd.CRASHED, 1: TrialEnd.FINISHED}

    def bad(trial: Trial) -> Observation:
        return dataclasses.replace(GOLDEN, end=ends[trial.repetition % 2], metrics=(0.8, 0.85, 0.6), digest="other")

    page = study_page(made_study(tmp_path / "study", HOSTILE, bad))
    totals = "Of 12 trainings with a known outcome: 0 N-EV, 6 failed (TF), 6 degraded (AccR), 0 changed, 0 identical."
    assert totals in page.answer


def test_published_figures_stand_beside_ours_and_are_marked(nev: Path) -> None:
    html = section(study_page(nev), "table")
    marked = re.findall(r'<td class="[^"]*\bpublished\b[^"]*" data-sort="([^"]*)">([^<]*)</td>', html)
    assert len(marked) == 12
    assert ("48.8", "48.8 / 56.8 / 66.8") in marked
    assert "as published by Rojas" in html
    other = dataclasses.replace(results_of(nev), source="somebody else")
    assert published_for(other) is None


def test_every_published_figure_is_of_a_study_and_a_measure_that_there_is() -> None:
    for name, published in _all().items():
        assert name in gallery()
        assert published.measure in ("", *PUBLISHED)
        assert {len(values) for _, values in published.cells} <= {len(published.series)}


def test_an_incomplete_study_says_so_first(tmp_path: Path) -> None:
    page = study_page(made_study(tmp_path / "study", "bitflip-nev", only=40))
    assert page.answer[0].startswith("**Not complete**: 40 of 72 trainings have a known outcome, and 6 of 12 cells")


def test_a_study_without_a_finished_trial_is_a_page_that_says_so(tmp_path: Path) -> None:
    page = study_page(made_study(tmp_path / "study", "bitflip-nev", only=0))
    assert page.answer[0].startswith("**Not complete**: 0 of 72")
    assert [one.anchor for one in page.sections] == ["settings", "cite"]


def test_a_damaged_journal_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = made_study(tmp_path / "study", HOSTILE)
    journal = StudyFolder(folder).journal
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], lines[3].replace(b'"steps": ', b'"steps": 9'), *lines[4:]]))
    page = study_page(folder)
    assert page.answer[0].startswith("**Not complete**: 11 of 12")
    assert "journal.jsonl line 4: its sum is not that of its content" in page.answer[1]


def test_no_study_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no study"):
        study_page(tmp_path / "nowhere")


def test_a_long_journal_is_sampled_and_the_page_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "MOST_CURVES", 8)
    folder = made_study(tmp_path / "study", HOSTILE, trainings=60)
    assert len(study_data(folder).observations) == 8
    page = study_page(folder)
    told = [one.text for one in blocks(page, Prose) if isinstance(one, Prose)]
    assert any(text.startswith("8 of 120 trainings are drawn") for text in told)
    traces = [trace for one in blocks(page, Figure) if isinstance(one, Figure) for trace in one.traces]
    assert len({trace["hovertemplate"] for trace in traces if trace.get("meta") == "faulty"}) <= 8


def test_the_worst_trials_come_with_the_command_that_replays_them(nev: Path) -> None:
    (commands, *_) = (one for one in blocks(study_page(nev), Commands) if isinstance(one, Commands))
    kept = StudyFolder(nev).journal_contents().entries
    ids = [line.rsplit(" ", 1)[1] for _, line in commands.lines]
    assert [line for _, line in commands.lines] == [f"evergrad study replay {nev} {name}" for name in ids]
    assert len(ids) == 10
    assert all(kept[name].observation.nonfinite_at for name in ids[:5])
    flips = [kept[name].trial.flips for name in ids[:5]]
    assert flips == sorted(flips)
    finals = [kept[name].observation.metrics[-1] for name in ids[5:]]
    assert finals == sorted(finals)


def test_a_distance_that_is_far_beyond_all_others_leaves_them_the_frame(tmp_path: Path) -> None:
    def far(trial: Trial) -> Observation:
        top = 1e30 if trial.repetition == 0 else 1e-4 if trial.repetition < 3 else 0.1
        return dataclasses.replace(GOLDEN, distances=Series(1, (1e-5, top)), digest="other")

    def axis_and_caption(name: str, see: See) -> tuple[dict[str, object], str]:
        drawn = blocks(study_page(made_study(tmp_path / name, HOSTILE, see)), Figure)
        (figure, *_) = (one for one in drawn if isinstance(one, Figure) and "distance" in one.name)
        return figure.layout["yaxis"], figure.caption

    axis, caption = axis_and_caption("far", far)
    low, high = axis["range"]  # type: ignore[misc]
    assert low < -5 < -1 < high < 0
    assert "far above most, are outside of the frame" in caption
    axis, caption = axis_and_caption("near", lambda trial: dataclasses.replace(far(trial), distances=Series(1, (1.0,))))
    assert "range" not in axis
    assert "outside" not in caption


def test_bits_have_their_places_and_colours(tmp_path: Path) -> None:
    page = study_page(made_study(tmp_path / "study", "bit-position"))
    (picture,) = (one for one in page.sections if one.anchor == "bits")
    (figure,) = picture.blocks
    assert isinstance(figure, Figure)
    bars = {trace["name"]: trace["x"] for trace in figure.traces if trace["type"] == "bar"}
    assert bars == {"sign": [0], "exponent": [1, 2, 5, 8], "mantissa": [9, 20, 31]}
    assert max(figure.traces[1]["y"]) == figure.traces[1]["y"][0] == 100


def test_layers_make_a_map(tmp_path: Path) -> None:
    page = study_page(made_study(tmp_path / "study", "by-layer"))
    (places,) = (one for one in page.sections if one.anchor == "places")
    (figure,) = places.blocks
    assert isinstance(figure, Figure)
    assert figure.traces[0]["y"] == ["first", "middle", "last"]
    assert figure.traces[0]["x"] == ["alexnet", "vgg16"]


def _costs(trial: Trial) -> Observation:
    slow = 2.0 if trial.saving is not None and trial.saving.strategy == "root" else 1.0
    costs = {"blocked_s": (0.01 * slow, 0.02 * slow), "with_s": (1.1 * slow,), "without_s": (1.0,)}
    return dataclasses.replace(GOLDEN, costs=costs)


def _spread(trial: Trial) -> Observation:
    parts = {"after": Series(1, (0.0, 1.0, 8.0)), "elements": Series(1, (0.001, 0.2, 0.4 + trial.seed % 7 / 100))}
    same = Series(1, (0.25, 1.0, 1.0))
    return dataclasses.replace(seen_of(trial), end=TrialEnd.FINISHED, spread={**parts, "layers": same, "ranks": same})


def _guards(trial: Trial) -> Observation:
    alarms = {"norm": trial.seed % 9 if trial.ranks else None, "replicas": 10 if trial.ranks else None}
    costs = {"guard norm": (0.001,), "guard replicas": (0.002,), "step": (0.1,)}
    return dataclasses.replace(seen_of(trial) if trial.ranks else GOLDEN, alarms=alarms, costs=costs)


@pytest.mark.parametrize(
    ("study", "see", "words", "figures"),
    [
        ("overhead", _costs, "saving root: blocked 30.0", 4),
        ("propagation", _spread, "What differs from the fault-free run: in the model, layer first", 3),
        ("guard", _guards, "Of trainings whose result changed, guards spoke up in: **norm**", 2),
    ],
)
def test_studies_that_watch_more_have_their_own_answer_and_figures(
    study: str, see: See, words: str, figures: int, tmp_path: Path
) -> None:
    page = study_page(made_study(tmp_path / "study", study, see, trainings=3))
    assert words in page.answer[0]
    first = page.sections[0].blocks
    assert len([one for one in first if isinstance(one, Figure)]) >= figures
    assert isinstance(first[-1], DataTable)


def test_in_a_browser_every_figure_draws_and_nothing_is_fetched(nev: Path, tmp_path: Path, open_page: OpenPage) -> None:
    page = study_page(nev)
    opened = open_page(write_page(page, tmp_path / "report.html"), width=390)
    assert opened.drawn() == len(blocks(page, Figure)) == 13
    assert opened.overflow() == 0
    assert opened.page.locator("h1").inner_text() == "N-EV after flipped bits in a checkpoint"
    assert (opened.errors, opened.requests) == ([], [])
    opened.page.locator("#columns th button").nth(2).click()
    assert opened.page.locator("#columns th").nth(2).get_attribute("aria-sort") == "ascending"


def test_the_command_writes_the_page_prints_the_answer_and_imports_no_torch(tmp_path: Path) -> None:
    folder = made_study(tmp_path / "study", HOSTILE)
    code = (
        "import sys; from evergrad.cli import main\n"
        f"assert not main(['study', 'report', {str(folder)!r}]), 'failed'\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "N-EV was" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("report.html")
    html = (folder / "report.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>alert" not in html


STARS = ("model/**", "optimizer/**", "**conv", "fc**", "`quoted` **name**")
STARRED = f"""
study = "stars"
title = "Flips in model/** and optimizer/**"
question = "What do flips in model/** and in optimizer/** do?"

[axes]
where = {list(STARS)}
flips = [1, 2, 4]
model = ["alexnet", "vgg11"]
"""


def test_globs_keep_their_stars_wherever_a_report_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_study(tmp_path / "study", STARRED, trainings=12)
    page = study_page(folder)
    text = re.sub(r"<script>.*?</script>", "", page_html(page), flags=re.S)
    bold = re.findall(r"<strong>(.*?)</strong>", text)
    assert bold, "what is meant to be bold is"
    assert not [one for one in bold if "model/" in one or "conv" in one or "name" in one], bold
    assert "quoted" not in "".join(re.findall(r"<code>(?!evergrad)(.*?)</code>", text))
    shown = re.sub(r"<[^>]+>", "", text).replace("&#x27;", "'")
    for anchor in ("table", "columns", "worst", "curves"):
        part = re.sub(r"<[^>]+>", "", section(page, anchor))
        # Of the curves a few groups are drawn.
        for name in STARS[: 2 if anchor == "curves" else 4]:
            assert name in part, (anchor, name)
    assert "What do flips in model/** and in optimizer/** do?" in shown
    assert main(["study", "report", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "where model/**" in told
    assert "N-EV was" in told
    assert "**N-EV**" not in told
    assert main(["study", "report", str(folder), "--json"]) == 0
    answer = " ".join(json.loads(capsys.readouterr().out)["answer"])
    assert "where model/**" in answer
    assert "**N-EV**" not in answer
    assert "\\*" not in answer


@pytest.mark.parametrize(
    ("text", "html", "plain"),
    [
        ("**bold** and `code`", "<strong>bold</strong> and <code>code</code>", "bold and code"),
        ("model/** and optimizer/**", "model/** and optimizer/**", "model/** and optimizer/**"),
        ("where **, where **", "where **, where **", "where **, where **"),
        ("**.weight and **.bias", "**.weight and **.bias", "**.weight and **.bias"),
        (f"**{escape_markup('a**b')} is bold**", "<strong>a**b is bold</strong>", "a**b is bold"),
        (escape_markup("**conv and fc**"), "**conv and fc**", "**conv and fc**"),
        (escape_markup("`a` \\*"), "`a` \\*", "`a` \\*"),
        ("**3 of 5 %; done.** More", "<strong>3 of 5 %; done.</strong> More", "3 of 5 %; done. More"),
        ("(**N-EV**)", "(<strong>N-EV</strong>)", "(N-EV)"),
    ],
)
def test_only_what_is_meant_as_markup_is_taken_for_it(text: str, html: str, plain: str) -> None:
    assert inline_html(text) == html
    assert plain_text(text) == plain


def test_without_plotly_the_answer_is_told_and_only_a_page_without_figures_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without_plotly" / "plotly").mkdir(parents=True)
    (tmp_path / "without_plotly" / "plotly" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "without_plotly")
    folder = made_study(tmp_path / "study", "bitflip-nev", trainings=3)
    assert main(["study", "report", str(folder)]) == 2
    told = capsys.readouterr()
    assert "N-EV was" in told.out
    assert told.err.count("\n") == 1
    assert "no page is written: figures need plotly, which is not installed: pip install" in told.err
    assert not (folder / "report.html").exists()
    empty = made_study(tmp_path / "empty", "bitflip-nev", trainings=3, only=0)
    assert main(["study", "report", str(empty)]) == 0
    assert "</html>" in (empty / "report.html").read_text()
