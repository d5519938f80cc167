"""A lineage as lines of text, newest first, as `git log --graph` draws history."""

from __future__ import annotations

from collections.abc import Iterator

from evergrad.checkpoint.catalogue.lineage import Key, Lineage, Node


def draw(lineage: Lineage) -> Iterator[tuple[str, Node | None]]:
    """The rows of the graph: the drawing, and the version that the row is of, or None where lines only meet."""
    waiting: list[Key] = []  # what each column leads down to
    for node in lineage.nodes:
        columns = [index for index, key in enumerate(waiting) if key == node.key]
        if len(columns) > 1:  # several came from this one
            yield _joining(waiting, columns), None
            for index in reversed(columns[1:]):
                del waiting[index]
        if not columns:
            waiting.append(node.key)
        place = columns[0] if columns else len(waiting) - 1
        yield " ".join(mark(node) if index == place else "│" for index in range(len(waiting))), node
        if node.parent is None:
            del waiting[place]
        else:
            waiting[place] = node.parent


def mark(node: Node) -> str:
    """Filled: can be restored; hollow: gone; dashed: only its name is known. With a ring: pinned."""
    if node.look == "unknown":
        return "◌"
    if node.look == "restorable":
        return "◉" if node.pinned else "●"
    return "◎" if node.pinned else "○"


def _joining(waiting: list[Key], columns: list[int]) -> str:
    first, last = columns[0], columns[-1]
    cells = []
    for index in range(len(waiting)):
        if index < first or index > last:
            cells.append("│ ")
        elif index == first:
            cells.append("├─")
        elif index == last:
            cells.append("╯ ")
        elif index in columns:
            cells.append("┴─")
        else:
            cells.append("┼─")
    return "".join(cells).rstrip()
