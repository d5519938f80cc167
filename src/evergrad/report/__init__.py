"""Reports: one self-contained page for a study, a run or its checkpoints, which opens without a network.

`html` is what every report is made of: prose, tables that sort, figures, commands. The modules beside it each
know one kind of report and turn what lies on disk into such a page. Nothing here imports torch.
"""

from __future__ import annotations

__all__: list[str] = []
