"""The page for users is true: its files, as they are shown, are a test suite that passes, and fails when it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "testing.md"


class Count:
    """What became of tests, in a pytest within this one."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.outcomes.append(report.outcome)


def suite(folder: Path) -> dict[str, str]:
    """The page's Python, each block the file that its first line names."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == PAGE.read_text().count("```python"), "every block names its file"
    for name, text in blocks:
        (folder / name).write_text(text)
    return dict(blocks)


def outcomes(folder: Path, *names: str) -> list[str]:
    count = Count()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={folder}", f"--basetemp={folder / 'temp'}"]
    pytest.main([*options, "-c", str(folder / "pytest.ini"), *names], plugins=[count])
    return count.outcomes


def test_the_files_of_the_page_are_tests_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert suite(tmp_path).keys() == {"train.py", "conftest.py", "test_train.py", "test_everywhere.py"}
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    # And a script in which step 3 never comes, for its epochs are left early.
    left = {"train.py": "left.py", "test_train.py": "test_left.py"}
    for name, other in left.items():
        text = (tmp_path / name).read_text().replace("job.step(optimizer)", "job.step(optimizer); break")
        (tmp_path / other).write_text(text.replace("train.py", "left.py"))
    found = outcomes(tmp_path, "test_train.py", "test_everywhere.py", "test_left.py")
    assert found == [*["passed"] * 4, "failed"]
