"""`evergrad checkpoints …`, as a person at a terminal meets it: real run folders, wrong input too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.tiers import Persistent
from evergrad.cli import main

VERBS = ["ls", "show", "verify", "pin", "rm", "export", "lineage", "report"]


@pytest.fixture
def run(tmp_path: Path, shm: Path) -> Path:
    """A job of two attempts: steps 1 to 4, then from 4 on step 5; the disk keeps three."""
    folder = tmp_path / "run"
    for steps in ((1, 2, 3, 4), (5,)):
        with eg.Checkpointer(folder, tiers=[eg.Local(keep=3)], agent=False) as ck:
            ck.restore({"w": torch.zeros(64), "step": 0})
            for step in steps:
                ck.save(step, {"w": torch.full((64,), float(step)), "step": step}, meta={"loss": 1 / step}).wait()
    return folder


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a verb in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["checkpoints", *map(str, arguments)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def rot(run: Path, name: str) -> None:
    """Flip a bit of a version on the disk."""
    shard = next(run.glob(f"local/*/*/{name}/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)


def test_ls_lists_the_newest_first_and_all_of_them_if_asked(run: Path, say: Any) -> None:
    code, out, err = say("ls", run)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("v0")]
    assert [row[0] for row in rows] == ["v0000000005-02", "v0000000004-01", "v0000000003-01"]
    assert rows[0][-1] == "v0000000004-01"
    assert "3 versions, and 2 retired (--all)" in out
    code, out, _ = say("ls", run, "--all", "--json")
    found = json.loads(out)
    assert [row["state"] for row in found["versions"]] == ["restorable"] * 3 + ["retired"] * 2
    first = found["versions"][0]
    assert (first["step"], first["attempt"], first["tiers"], first["meta"]) == (5, 2, ["local"], {"loss": 0.2})
    assert found["unseen"] == []


def test_show_tells_each_ranks_file_and_what_was_noted(run: Path, say: Any) -> None:
    code, out, _ = say("show", run, "5")
    assert code == 0
    for words in ("v0000000005-02: step 5, attempt 2", '{"loss": 0.2}', "parent    v0000000004-01", "never"):
        assert words in out
    found = json.loads(say("show", run, "latest", "--json")[1])
    (shard,) = found["shards"]
    assert Path(shard["shard"]).is_file()
    assert (shard["rank"], shard["tier"], shard["tensors"]) == (0, "local", 1)
    assert found["digest"]


def test_verify_notes_its_verdict_and_exits_1_if_something_is_wrong(run: Path, say: Any) -> None:
    code, out, _ = say("verify", run)
    assert (code, "0 of 3 versions wrong" in out) == (0, True)
    assert {row["verified"] for row in json.loads(say("ls", run, "--json")[1])["versions"]} == {"ok"}
    rot(run, "v0000000004-01")
    code, out, _ = say("verify", run)
    assert code == 1
    assert "rank 0 in tier local: w: not what was captured" in out
    assert "1 of 3 versions wrong" in out
    verified = {row["step"]: row["verified"] for row in json.loads(say("ls", run, "--json")[1])["versions"]}
    assert verified == {5: "ok", 4: "failed", 3: "ok"}
    code, out, _ = say("verify", run, "5", "--tier", "local", "--json")
    report = json.loads(out)
    assert code == 0
    assert [(row["version"], row["verdict"]) for row in report["versions"]] == [("v0000000005-02", "ok")]
    assert [copy["verdict"] for copy in report["versions"][0]["copies"]] == ["ok"]


def test_a_pinned_version_outlives_retention_and_rm(run: Path, say: Any) -> None:
    assert say("pin", run, "3", "--tag", "best")[1] == "v0000000003-01: pinned, tag best\n"
    code, out, err = say("rm", run, "best", "--yes")
    assert (code, out) == (2, "")
    assert "is pinned (tag best): unpin it first" in err
    with eg.Checkpointer(run, tiers=[eg.Local(keep=1)], agent=False) as ck:
        ck.restore({"w": torch.zeros(64), "step": 0})
        ck.save(6, {"w": torch.zeros(64), "step": 6}).wait()
    rows = {row["step"]: row["tags"] for row in json.loads(say("ls", run, "--json")[1])["versions"]}
    assert rows == {6: [], 3: ["best"]}
    assert json.loads(say("pin", run, "best", "--unpin", "--json")[1])["pinned"] is False
    assert say("rm", run, "3", "--yes")[0] == 0
    assert [row["step"] for row in json.loads(say("ls", run, "--json")[1])["versions"]] == [6]


def test_one_tag_can_be_taken_away(run: Path, say: Any) -> None:
    say("pin", run, "3", "--tag", "best")
    say("pin", run, "3", "--tag", "paper")
    assert json.loads(say("pin", run, "3", "--unpin", "--tag", "best", "--json")[1])["tags"] == ["paper"]
    assert "has no tag 'best'" in say("pin", run, "3", "--unpin", "--tag", "best")[2]


def test_rm_says_what_it_removes_and_asks_first(run: Path, say: Any) -> None:
    code, out, _ = say("rm", run, "4", "--dry-run")
    assert code == 0
    assert "rank-00000.safetensors" in out
    assert "v0000000004-01: would be removed" in out
    code, _, err = say("rm", run, "4", "--json")
    assert (code, "Say --yes" in err) == (2, True)
    assert len(list(run.glob("local/*/*/v*"))) == 3
    code, out, _ = say("rm", run, "4", "--yes", "--json")
    assert (code, len(json.loads(out)["removed"])) == (0, 1)
    assert not list(run.glob("local/*/*/v0000000004-01"))
    code, _, err = say("rm", run, "latest", "--yes")
    assert (code, "say --force" in err) == (2, True)
    assert say("rm", run, "latest", "--yes", "--force")[0] == 0
    with eg.Checkpointer(run, tiers=[eg.Local(keep=3)], agent=False) as ck:
        assert ck.restore({"w": torch.zeros(64), "step": 0}) == 3


def test_export_writes_a_plain_file(run: Path, say: Any, tmp_path: Path) -> None:
    code, out, _ = say("export", run, "latest", tmp_path / "all.pt")
    assert code == 0
    assert "v0000000005-02 as pt, 1 tensors, 256 B" in out
    assert torch.load(tmp_path / "all.pt", weights_only=True)["step"] == 5
    report = json.loads(say("export", run, "4", tmp_path / "w.safetensors", "--where", "w", "--json")[1])
    assert (report["format"], report["tensors"]) == ("safetensors", 1)
    code, _, err = say("export", run, "4", tmp_path / "w.safetensors")
    assert (code, "exists already" in err) == (2, True)
    assert say("export", run, "4", tmp_path / "w.safetensors", "--overwrite")[0] == 0


def test_a_damaged_version_is_not_exported(run: Path, say: Any, tmp_path: Path) -> None:
    rot(run, "v0000000005-02")
    code, _, err = say("export", run, "5", tmp_path / "all.pt")
    assert code == 2
    assert "no intact shard of rank 0: tier local: w: not what was captured" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "all.pt").exists()


def test_lineage_draws_a_graph_and_a_picture(run: Path, say: Any, tmp_path: Path) -> None:
    say("pin", run, "4")
    code, out, err = say("lineage", run)
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["●", "v0000000005-02"],
        ["◉", "v0000000004-01"],
        ["●", "v0000000003-01"],
        ["○", "v0000000002-01"],
        ["○", "v0000000001-01"],
    ]
    graph = json.loads(say("lineage", run, "--json")[1])
    assert (len(graph["nodes"]), len(graph["edges"])) == (5, 4)
    job = graph["job"]
    assert {"from": f"{job}/v0000000004-01", "to": f"{job}/v0000000005-02"} in graph["edges"]
    assert say("lineage", run, "--picture", tmp_path / "r.svg")[0] == 0
    ElementTree.parse(tmp_path / "r.svg")
    assert "exists already" in say("lineage", run, "--picture", tmp_path / "r.svg")[2]
    assert "ends in .svg" in say("lineage", run, "--picture", tmp_path / "r.png")[2]


def test_the_url_of_a_persistent_tier_will_do_where_nothing_is_changed(tmp_path: Path, shm: Path, say: Any) -> None:
    url = f"file://{tmp_path}/shared"
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(), Persistent(url)], agent=False) as ck:
        ck.save(7, {"w": torch.arange(4.0)}).wait(tier="persistent")
    assert json.loads(say("ls", url, "--json")[1])["versions"][0]["tiers"] == ["persistent"]
    assert say("show", url, "7")[0] == 0
    assert say("verify", url)[0] == 0
    assert say("lineage", url)[0] == 0
    assert say("export", url, "latest", tmp_path / "out.pt")[0] == 0
    for arguments in (("pin", url, "7"), ("rm", url, "7", "--yes")):
        code, _, err = say(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert "name its run folder" in err
    shard = tmp_path / "shared" / "v0000000007-01" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert say("verify", url)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "missing"], "there is no such run folder"),
        (["ls", "file"], "is no folder"),
        (["ls", "empty"], "there is no job.json in it"),
        (["ls", "s4://x/y"], "s4"),
        (["ls", "file:///nowhere/at/all"], "no job has versions there"),
        (["ls"], "Missing argument"),
        (["show", "run", "120"], "The nearest are v0000000005-02"),
        (["show", "run", "lates"], "Did you mean 'latest'"),
        (["verify", "run", "1"], "nothing of it is left that could be checked"),
        (["verify", "run", "--tier", "tape"], "there is no tier 'tape'. There are memory, local"),
        (["verify", "run", "5", "--tier", "memory"], "nothing of it is in tier memory"),
        (["pin", "run", "1"], "is gone: there is nothing to keep"),
        (["pin", "run", "5", "--tag", "a/b"], "expected letters"),
        (["rm", "run", "1", "--yes"], "nothing of it is left"),
        (["rm", "run", "4", "--tier", "tape", "--yes"], "there is no tier 'tape'"),
        (["rm", "run", "4"], "nobody is there to be asked"),
        (["export", "run", "1", "out.pt"], "nothing of it is left to export"),
        (["export", "run", "5", "file"], "exists already"),
        (["export", "run", "5", "out.xyz"], "no format is written"),
        (["export", "run", "5", "out.pt", "--rank", "3"], "there is no rank 3"),
        (["export", "run", "5", "out.pt", "--where", "x"], "unknown tensor 'x'"),
        (["lineage", "run", "--picture", "no/r.svg"], "there is no folder"),
        (["nonsense", "run"], "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(
    arguments: list[str], words: str, run: Path, say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    before = sorted(path for path in tmp_path.rglob("*"))
    code, out, err = say(*arguments)
    assert code == 2
    assert err.count("\n") == 1, err
    assert err.startswith("evergrad: ")
    assert words in err
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert "Traceback" not in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_an_example_and_its_exit_codes_in_its_help(verb: str, say: Any) -> None:
    code, text, _ = say(verb, "--help")
    assert code == 0
    assert "--json" in text
    assert f"evergrad checkpoints {verb}" in text.split("Example", 1)[1]
    assert "Exit codes: 0" in text


def test_help_and_ls_import_no_torch(run: Path) -> None:
    code = (
        "import sys\nfrom evergrad.cli import main\nmain(['checkpoints', '--help'])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        f"for verb in ('ls', 'verify', 'lineage', 'report'): assert main(['checkpoints', verb, {str(run)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_plotly_the_state_of_the_versions_is_told_and_no_page_is_written(
    run: Path, say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without_plotly" / "plotly").mkdir(parents=True)
    (tmp_path / "without_plotly" / "plotly" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "without_plotly")
    code, out, err = say("report", run)
    assert (code, err.count("\n")) == (2, 1)
    assert out.startswith("5 versions in 2 attempts; 3 can be restored, the newest is step 5 (attempt 2) in local.")
    assert "no page is written: figures need plotly" in err
    code, out, err = say("report", run, "--json")
    assert (code, json.loads(out)["page"], err.count("\n")) == (2, None, 1)
    assert list(run.glob("*.html")) == []
