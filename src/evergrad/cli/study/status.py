"""`evergrad study status`: how far a study is, while it runs or afterwards."""

from __future__ import annotations

from evergrad.cli.output import JsonOption, print_json, printable
from evergrad.cli.study.arguments import StudyDir

EPILOG = "Example:\n\n  evergrad study status runs/nev\n\nExit codes: 0 told · 2 usage, or no study there."


def status(folder: StudyDir, as_json: JsonOption = False) -> int:
    """Say how many trials are done, whether somebody runs the study now, and what could not be read."""
    from evergrad.study.folder import StudyFolder
    from evergrad.study.outcomes import SCALE
    from evergrad.study.tally import results_of

    results = results_of(folder)
    running = StudyFolder(folder).is_running()
    counts = {outcome.value: sum(cell.counts[outcome] for cell in results.cells) for outcome in SCALE}
    done = sum(counts.values()) - counts["unknown"]
    complete = sum(cell.known >= cell.due for cell in results.cells)
    if as_json:
        print_json(
            {
                "study": results.study,
                "scale": results.scale,
                "running": running,
                "trials": results.trials,
                "done": done,
                "cells": len(results.cells),
                "complete_cells": complete,
                "outcomes": dict(counts),
                "notes": list(results.notes),
            }
        )
        return 0
    state = "running" if running else "complete" if done == results.trials else "not running"
    print(printable(f"{results.study}{f' ({results.scale})' if results.scale else ''}: {state}"))
    print(f"trials    {done:,} of {results.trials:,}")
    print(f"cells     {complete} of {len(results.cells)} complete")
    print(f"outcomes  {', '.join(f'{count:,} {name}' for name, count in counts.items() if count) or 'none yet'}")
    for note in results.notes:
        print(printable(f"note: {note}"))
    if state == "not running":
        print("The command that began it goes on with what is missing.")
    return 0
