"""`evergrad study list`: the gallery."""

from __future__ import annotations

from evergrad.cli.output import JsonOption, console, print_json, printable

EPILOG = "Example:\n\n  evergrad study list --json\n\nExit codes: 0 listed · 2 usage."
_WIDE = 110  # columns of a terminal, from which on there is room for the axes


def list_(as_json: JsonOption = False) -> int:
    """List the studies that come with Evergrad, and how many trials each has at each scale."""
    from evergrad.study.plan import SCALES, Plan
    from evergrad.study.plan_files import gallery, read_plan_text

    plans = {name: {scale: Plan.of(read_plan_text(name), scale) for scale in SCALES} for name in gallery()}
    if as_json:
        print_json(
            {
                "studies": [
                    {
                        "study": name,
                        "title": scales["tiny"].title,
                        "question": scales["tiny"].question,
                        "source": scales["tiny"].source,
                        "axes": list(scales["tiny"].axes),
                        "trials": {scale: plan.trials for scale, plan in scales.items()},
                    }
                    for name, scales in plans.items()
                ]
            }
        )
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    out = console()
    columns = ("study", "question", "axes") if out.width >= _WIDE else ("study", "question")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "study")
    for scale in SCALES:
        table.add_column(scale, justify="right")
    for name, scales in plans.items():
        plan = scales["tiny"]
        words = (name, plan.question, ", ".join(plan.axes))[: len(columns)]
        cells = (*words, *(f"{scales[scale].trials:,}" for scale in SCALES))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out.print(table)
    print("\nNumbers are trials. 'evergrad study show NAME' tells more, 'study run NAME' runs it.")
    print("A plan of your own is a file like those: evergrad study show NAME --plan > mine.toml")
    return 0
