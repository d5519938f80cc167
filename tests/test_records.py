"""The codec of records: what is written is the same JSON as ever, and what is read is the record that was written."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from evergrad.records import record_from_json, record_to_json
from evergrad.recovery.guard.replicas import ReplicaDifference, TensorChange
from evergrad.recovery.heartbeat import ProcessHealth
from evergrad.recovery.launch.node_protocol import NodeHeartbeat, StartOrder
from evergrad.recovery.launch.settings import ProcessPlacement
from evergrad.recovery.membership import EpochBoundary, MembershipPlan, PointKind, SurvivorReport, Verdict
from evergrad.testing.hang_report import LauncherExit, StuckProcess

RECORDS = [
    EpochBoundary(1, 2, PointKind.END, 3, 4, 5),
    SurvivorReport(1, 2, 3, 4, PointKind.STEP, 5, done=(0, 2), buckets=3, reason="a 'quoted' line", leaves=True),
    MembershipPlan(
        2,
        (0, 3),
        previous=(0, 1),
        joiners=(3,),
        source=0,
        kind=PointKind.STEP,
        verdicts={0: Verdict.REPAIR},
        takes={3: 1},
        todo=(1,),
        dead=(1,),
        vacant=((1, 7), (2, 8)),
        held={0: 3},
    ),
    StartOrder(ProcessPlacement(1, 0, 2, None), 4),
    NodeHeartbeat(7, (ProcessHealth(1, 2, 0.5, False, 0.25, 3, 0.0, 0.0, 4, "a stack"),)),
    LauncherExit(-9, True, (StuckProcess(1, "rank 1", "stopped"),)),
    ReplicaDifference(1, "model/w", "one element", TensorChange(1, 2, 0.5, None, 3), True),
    ReplicaDifference(1, "model/w", "another shape"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_from_its_json_and_the_json_is_as_it_was(record: object) -> None:
    text = json.dumps(record_to_json(record))
    assert text == json.dumps({name: value for name, value in asdict(record).items() if name != "_ranks"})  # type: ignore[call-overload]
    back = record_from_json(type(record), json.loads(text))
    assert back == record
    assert repr(back) == repr(record), "of the same types, down to the keys"


def test_a_missing_field_has_its_default_and_an_unknown_one_is_refused() -> None:
    assert record_from_json(NodeHeartbeat, {"number": 3}) == NodeHeartbeat(3)
    with pytest.raises(TypeError, match="unknown"):
        record_from_json(NodeHeartbeat, {"number": 3, "unknown": 1})
    with pytest.raises(ValueError, match="sideways"):
        record_from_json(EpochBoundary, asdict(EpochBoundary(1, 2, PointKind.END, 3, 4, 5)) | {"kind": "sideways"})
