"""One trial in a fresh launch, as published studies run it: `torchrun --nproc-per-node N fresh.py FOLDER TRIAL OUT`.

Every rank imports torch, loads model and data, reads the checkpoint, is hit if it is one of those, trains, and is gone.
The faults and the training are our own code; the golden run is neither repeated nor followed step by step. Rank 0
writes what was seen to OUT.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from evergrad.injection.faults import fault_of
from evergrad.injection.live_faults import LiveState, PreparedFault
from evergrad.records import Role
from evergrad.study.golden import golden_folder, read_golden
from evergrad.study.loaded_trainings import read_snapshot
from evergrad.study.observe import GoldenTrajectory, observe
from evergrad.study.target_selection import select_targets
from evergrad.study.tasks import draw_faulty_ranks, rank_seed
from evergrad.study.trials import Trial
from evergrad.training.mechanisms import make_session
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload


def main() -> None:
    """The whole life of the process."""
    folder, trial, out = Path(sys.argv[1]), Trial.from_json(json.loads(sys.argv[2])), Path(sys.argv[3])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    assert isinstance(trial.training, Training)
    golden = read_golden(folder, trial.training.key)
    assert golden is not None
    session = make_session(trial.training, make_workload(trial.training))
    session.restore(read_snapshot(golden_folder(folder, golden.key), golden, session))
    if session.rank in draw_faulty_ranks(trial.seed, trial.ranks, session.ranks):
        numbers = session.parameters()
        named = [name for name in session.state() if name.startswith("model/")]
        live = LiveState(session.state(), {name: Role.MODEL if name in numbers else Role.BUFFER for name in named})
        aim = PreparedFault(
            live, fault_of(trial.fault), select_targets(live.tensors, trial.where, trial.layer, numbers)
        )
        aim.inject(trial.flips, rank_seed(trial.seed, session.rank, trial.ranks))
    course = GoldenTrajectory.empty(session, trial.training.epochs)
    # As a golden run: distances, which no other program takes, are left out.
    seen = observe(session, trial.training.epochs, trial.rules, course, golden=True)
    if session.rank == 0:
        out.write_text(json.dumps(replace(seen, mismatches=None).to_json()))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
