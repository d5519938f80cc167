"""`evergrad timeline`, as a person at a terminal meets it: a real run's folder, and wrong input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evergrad.cli import main

REAL = Path(__file__).parent.parent / "data" / "run_kill"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that lost a rank."""
    return Path(shutil.copytree(REAL, tmp_path / "kill"))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["timeline", *map(str, arguments)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_a_failure_is_a_row_and_the_page_lies_in_the_run(run: Path, say: Any) -> None:
    code, out, err = say(run)
    assert (code, err) == (0, "")
    head, row, *rest = out.splitlines()
    assert " ".join(head.split()) == "failure step seen agreed going on in all then"
    assert " ".join(row.split()) == "rank 2 died (SIGKILL) 10 11 ms 14 ms 72 ms 97 ms redo, spare 4"
    assert max(map(len, (head.rstrip(), row.rstrip()))) <= 80
    assert rest[1] == "4 ranks and 1 spare, 24 steps in 8.76 s: finished; 1 failure, 97 ms to the next step"
    assert (run / "timeline.html").read_text().count("</html>") == 1


def test_json_is_the_same_as_data(run: Path, say: Any) -> None:
    code, out, _ = say(run, "--json", "--no-page")
    found = json.loads(out)
    assert code == 0
    (failure,) = found["failures"]
    assert failure["phases_s"] == {"unseen": 0.011269, "agreeing": 0.014032, "recovering": 0.072102}
    assert (found["outcome"], found["steps"], found["exact"], found["page"]) == ("finished", 24, None, None)
    assert not (run / "timeline.html").exists()


def test_the_page_goes_where_it_is_told(run: Path, say: Any, tmp_path: Path) -> None:
    assert say(run, "--out", tmp_path / "x.html")[0] == 0
    assert (tmp_path / "x.html").exists()
    assert not (run / "timeline.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["kill/timeline.jsonl"], "Name its folder: evergrad timeline kill"),
        (["a job"], "evergrad checkpoints report 'a job'"),
        (["a study"], "evergrad study report 'a study'"),
        (["kill/run.json"], "is no folder"),
        (["empty"], "there is no timeline.jsonl in it. Expected the folder of evergrad run --out"),
        (["."], "There is one in begun, garbage, kill."),
        (["begun"], "no event in it"),
        (["garbage"], "line 1 is no event of a timeline"),
        (["kill", "--out", "nowhere/x.html"], "nowhere/x.html: there is no folder 'nowhere'"),
        (["kill", "--out", "kill/timeline.jsonl"], "is no page, and is not overwritten by one"),
        (["kill", "--out", "kill"], "kill: is no file"),
        (["kill", "--out", "x.html", "--no-page"], "expected one of them, found both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], words: str, run: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    for name, content in (("empty", None), ("begun", ""), ("garbage", "no JSON\n")):
        Path(name).mkdir()
        if content is not None:
            (Path(name) / "timeline.jsonl").write_text(content)
    for name, file in (("a job", "job.json"), ("a study", "plan.toml")):
        Path(name).mkdir()
        (Path(name) / file).touch()
    told = Path("kill/timeline.jsonl").read_bytes()
    code, out, err = say(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert Path("kill/timeline.jsonl").read_bytes() == told
    assert err.count("\n") == 1


def test_numbers_that_no_clock_shows_are_left_out(run: Path, say: Any) -> None:
    with open(run / "timeline.jsonl", "a") as file:
        file.write('{"schema_version": 1, "time": NaN, "mono": 1e999, "who": "x", "event": "y"}\n')
    number = len((run / "timeline.jsonl").read_bytes().splitlines())
    assert f"1 line is damaged, and left out: timeline.jsonl:{number}." in say(run, "--no-page")[1]
    with open(run / "timeline.jsonl", "a") as file:
        file.write('{"schema_version": 1, "time": 1' + "0" * 400 + ', "mono": 1, "who": "x", "event": "y"}\n')
    code, out, _ = say(run, "--no-page")
    assert code == 0
    assert f"2 lines are damaged, and left out: timeline.jsonl:{number}, timeline.jsonl:{number + 1}." in out


@pytest.mark.parametrize("time", ["NaN", "1e400", "1" + "0" * 400])
def test_a_timeline_of_which_no_line_has_a_time_is_damaged_and_the_line_is_named(
    time: str, run: Path, say: Any
) -> None:
    line = f'{{"schema_version": 1, "time": {time}, "mono": 1, "who": "x", "event": "y"}}\n'
    (run / "timeline.jsonl").write_text(line)
    code, out, err = say(run, "--no-page")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "timeline.jsonl: line 1 is no event of a timeline: " in err


def test_a_timeline_that_is_no_text_is_told_in_words(run: Path, say: Any) -> None:
    (run / "timeline.jsonl").write_bytes(b'{"a": "\xff"}\n')
    code, _, err = say(run, "--no-page")
    assert code == 2
    assert "line 1 is no event of a timeline: expected UTF-8 text, found the byte 0xff at offset 7" in err
    assert "codec" not in err


def test_a_torn_line_within_is_left_out_and_the_rest_is_told(run: Path, say: Any) -> None:
    lines = (run / "timeline.jsonl").read_bytes().splitlines(keepends=True)
    torn = [*lines[:3], b"\xff\x00\n", lines[3][:20] + b"\n", *lines[4:]]
    (run / "timeline.jsonl").write_bytes(b"".join(torn))
    code, out, err = say(run)
    assert (code, err) == (0, "")
    assert "2 lines are damaged, and left out: timeline.jsonl:4, timeline.jsonl:5." in out
    assert "1 failure, 97 ms to the next step" in out
    assert "2 lines are damaged, and left out: " in (run / "timeline.html").read_text()


def test_what_the_clocks_of_several_machines_are_worth_is_printed(run: Path, say: Any) -> None:
    path = run / "timeline.jsonl"
    path.write_text(path.read_text().replace('"is_spread": false', '"is_spread": true'))
    code, out, _ = say(run, "--no-page")
    assert code == 0
    assert "differences of their wall clocks" in out


def test_no_torch_is_needed(run: Path) -> None:
    code = (
        f"import sys\nfrom evergrad.cli import main\nassert main(['timeline', {str(run)!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which plotly's files are not there."""
    (tmp_path / "site" / "plotly").mkdir(parents=True)
    (tmp_path / "site" / "plotly" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.mark.usefixtures("without_plotly")
def test_without_plotly_the_table_is_told_and_one_line_says_how_to_get_the_page(run: Path, say: Any) -> None:
    code, out, err = say(run)
    assert code == 0
    assert " ".join(out.splitlines()[1].split()).startswith("rank 2 died (SIGKILL) 10 11 ms")
    assert err.count("\n") == 1
    assert err.startswith("evergrad: no page is written: figures need plotly, which is not installed: pip install ")
    assert "[report]" in err
    assert not (run / "timeline.html").exists()
    code, out, err = say(run, "--json")
    assert (code, json.loads(out)["page"], err.count("\n")) == (0, None, 1)
    assert say(run, "--no-page")[::2] == (0, "")


@pytest.mark.usefixtures("without_plotly")
def test_without_plotly_a_page_that_was_asked_for_by_name_is_missing_and_the_exit_code_says_so(
    run: Path, say: Any, tmp_path: Path
) -> None:
    code, out, err = say(run, "--out", tmp_path / "x.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "rank 2 died (SIGKILL)" in out
    assert "pip install" in err
    assert not (tmp_path / "x.html").exists()
