"""Scripts that leave out a part of the loop, or take a spare for a rank: stopped by one line, or harmless."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evergrad as eg
from evergrad.errors import UsageError
from evergrad.recovery.job import SingleRankDDP
from evergrad.recovery.launch.settings import LaunchSettings, environment_of
from evergrad.recovery.launch.summary import Summary
from evergrad.recovery.usage_checks import OptimizerCalls, refuse_model
from evergrad.testing import JobRun, run_job

SCRIPT = Path(__file__).parent / "usage_trainer.py"


@pytest.fixture
def use(tmp_path: Path, shm: Path) -> Any:
    """Run the script that does one thing otherwise: `use("no wrap", ranks=2)`."""
    numbers = iter(range(100))

    def run(what: str, *arguments: object, **how: Any) -> JobRun:
        folder = tmp_path / f"job-{next(numbers)}"
        how["options"] = [
            "--heartbeat-timeout",
            30,
            *how.get("options", ()),
        ]  # a busy machine is no reason to be taken for dead
        return run_job(SCRIPT, what, *arguments, folder=folder, **{"ranks": 2, "timeout": 90.0, **how})

    return run


def ends(ran: JobRun) -> dict[int, dict[str, Any]]:
    """What each process said at its end, by uid."""
    lines = [line.partition("ended ")[2] for line in ran.stdout.splitlines() if "] ended {" in line]
    return {found["uid"]: found for found in map(json.loads, lines)}


def last_line(ran: JobRun) -> str:
    return ran.stderr.strip().splitlines()[-1]


# Calls that are left out.


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no wrap", "job.step: no model was given to job.wrap"),
        ("no wrap, optimizer.step", "none from job.step, and no model was given to job.wrap"),
        ("wrapped is not called", "the model that job.wrap returned was never called"),
        ("optimizer.step", "SGD.step() was called inside of job.batches"),
        ("both steps", "SGD.step() was called inside of job.batches"),
        ("between epochs", "SGD.step() was called outside of job.batches"),
        ("no batches", "backward through the model of job.wrap without a batch of job.batches"),
        ("warms up", "backward through the model of job.wrap without a batch of job.batches"),
        ("only join", "made 24 optimizer steps, but never called job.wrap, job.batches and job.step"),
        ("parameters outside", "group 1 of SGD has a parameter of shape (1, 8) whose gradient is not reduced"),
        ("unfreezes", "a parameter of shape (16, 8) whose gradient is not reduced"),
        ("nests", "job.batches: an epoch is under way"),
        ("no backward", "Call loss.backward() before job.step"),
        ("no backward, zeros", "Either loss.backward() was not called for it, or it ran under no_sync()"),
        ("one call of batches", "job.batches: the batches of one call are one epoch, and this one is over"),
        ("updates by hand", "12 backward passes reduced gradients in it, and job.step was not called"),
        ("first epoch only", "12 backward passes reduced gradients in it, and job.step was not called"),
        ("copy is wrapped", "found SGD with 4 parameters, none of them that model's"),
        ("untracked scaler", "a GradScaler has scaled a loss, and is not tracked"),
        ("skips a batch", "has taken"),
        ("breaks on one rank", "and rank 1 begins epoch 1. Every rank has to take equally many batches"),
        ("own loaders differ", "and rank 1 has come to the end of epoch 0. Every rank has to take equally many"),
    ],
)
def test_a_script_that_leaves_out_a_call_is_stopped_by_a_line_that_names_it(use: Any, what: str, said: str) -> None:
    ran = use(what)
    assert ran.exit_code == 2, ran.stderr
    assert said in last_line(ran)
    assert "job.step" in last_line(ran) or "job.batches" in last_line(ran)
    assert len(ran.stderr.strip().splitlines()) == 2, "where the logs are, and this line"


@pytest.mark.parametrize("wraps", [0, 1])
def test_a_model_that_one_rank_only_wraps_is_refused_instead_of_waiting_for_the_others(use: Any, wraps: int) -> None:
    ran = use(f"only rank {wraps} wraps")
    assert ran.exit_code == 2, ran.stderr
    said = f"job.wrap: rank {wraps} has called it, and rank {1 - wraps} has begun job.batches without it"
    assert said in last_line(ran)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wider on rank 1", "model/weight is no. 1, float32 [1, 8] on rank 0 and no. 1, float32 [2, 8] on rank 1"),
        ("other order on rank 1", "model/a.weight is no. 1, float32 [8, 8] on rank 0 and no. 3, float32 [8, 8] on"),
    ],
)
def test_different_models_on_the_ranks_are_refused_before_anything_is_exchanged(use: Any, what: str, said: str) -> None:
    ran = use(what)
    assert ran.exit_code == 2, ran.stderr
    assert f"job.wrap: ranks have built different models: {said}" in last_line(ran)


def test_a_spare_that_has_built_another_model_says_so_and_the_job_goes_on_without_it(use: Any) -> None:
    ran = use("wider on spares", spares=1, failures="kill rank=1 step=4")
    ran.assert_finished()
    assert "weight is shape [1, 8] there and shape [2, 8] here. Build the same model in every process" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.summary["exact"] is False


def test_a_model_may_be_wrapped_after_an_epoch_without_one(use: Any) -> None:
    ran = use("wraps later")
    ran.assert_finished()
    ran.assert_equal_weights()
    assert ran.summary["steps"] == 24


def test_a_signal_to_a_process_that_ends_by_a_mistake_shows_no_traceback_either(use: Any) -> None:
    ran = use("told to leave as it ends")
    assert ran.exit_code == 2, ran.stderr
    assert "job.step: no batch since the last step" in last_line(ran)
    assert len(ran.stderr.strip().splitlines()) == 2, ran.stderr


def test_the_traceback_of_a_mistake_is_in_the_log_alone(use: Any) -> None:
    ran = use("no wrap")
    assert ran.exit_code == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    logs = "".join((ran.folder / "run" / "logs" / f"{uid}.log").read_text() for uid in (0, 1))
    head, _, rest = logs.partition("Traceback (most recent call last):\n")
    assert rest.startswith(f'  File "{SCRIPT}", line '), logs
    assert "UsageError: job.step: no model was given to job.wrap" in rest
    assert head == ""


@pytest.mark.parametrize("failure", ["kill rank=1 step=4", "leave rank=1 step=4", "kill rank=1 step=5"])
def test_a_counter_by_which_ranks_leave_an_epoch_at_different_batches_after_a_loss_is_said(
    use: Any, failure: str
) -> None:
    """A kill puts the survivors' counters one ahead, and that of the joiner begins at 0 in any case.

    After the kill in step 5 the survivors leave when the joiner has made one step, before ranks are compared again.
    """
    ran = use("breaks by its own counter", "--await-spare", 3, ranks=3, spares=1, failures=failure)
    assert ran.exit_code == 2, ran.stderr
    assert "rank 1 is at step" in last_line(ran)
    assert "begins epoch 1" in last_line(ran)
    assert "Traceback" not in ran.stderr
    use("breaks by its own counter", ranks=3).assert_finished()


def test_a_rank_that_dies_while_others_wait_for_it_at_the_end_of_an_epoch_is_replaced(use: Any) -> None:
    whole = use("plain", ranks=3)
    last = "kill rank=1 step=7 phase=optimizer"
    ran = use("plain", "--await-spare", 3, ranks=3, spares=1, failures=last)
    ran.assert_survived(1)
    assert {end["weights"] for end in ends(ran).values()} == {end["weights"] for end in ends(whole).values()}


def test_a_restart_before_the_first_checkpoint_says_that_the_job_begins_from_its_beginning(use: Any) -> None:
    ran = use("plain", "--checkpoints", "{folder}/ck", "--await-spare", 2, spares=1, strategy="restart",
              failures="kill rank=1 step=1")  # fmt: skip
    ran.assert_survived(1)
    assert ran.stderr.count("evergrad: there is no checkpoint yet: the job begins from its beginning") == 1, ran.stderr
    later = use("plain", "--checkpoints", "{folder}/ck", "--await-spare", 2, spares=1, strategy="restart",
                failures="kill rank=1 step=8")  # fmt: skip
    later.assert_survived(1)
    assert "no checkpoint yet" not in later.stderr


def test_a_scaler_may_be_tracked_or_unscale_the_gradients_itself(use: Any) -> None:
    for what in ("scaler is tracked", "scaler unscales"):
        use(what).assert_finished()


def test_an_option_that_the_model_wrapper_of_torch_refuses_is_one_line(use: Any) -> None:
    ran = use("a wrong option")
    assert ran.exit_code == 2, ran.stderr
    assert "job.wrap(bucket_cap_mb='x'): DistributedDataParallel refuses that: " in last_line(ran)
    assert len(last_line(ran)) < 400


def test_ranks_of_which_nothing_was_compared_are_not_said_to_be_exact(use: Any) -> None:
    ran = use("no wrap, by hand")
    assert ran.exit_code == 0, ran.stderr
    assert len({end["weights"] for end in ends(ran).values()}) == 2
    assert ran.summary["exact"] is None
    assert ran.summary["unverified"] == "job.wrap was given no model, so nothing of the ranks was compared"


def test_a_missing_job_step_is_found_before_a_failure_or_a_spare_can_make_it_worse(use: Any) -> None:
    ran = use("optimizer.step", spares=1, failures="kill rank=1 step=5")
    assert ran.exit_code == 2, ran.stderr
    assert "Call job.step(optimizer) instead" in last_line(ran)


@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_updates_by_hand_are_refused_when_a_spare_joins_too(use: Any, strategy: str) -> None:
    ran = use("updates by hand", "--await-spare", 2, spares=1, failures="kill rank=1 step=0", strategy=strategy)
    assert ran.exit_code == 2, ran.stderr
    assert "job.step was not called" in last_line(ran)
    assert [event["rank"] for event in ran.events("process_lost") if event["how"] != "exit code 1"] == [1]


@pytest.mark.parametrize("strategy", ["rollback", "forward"])
def test_a_rank_that_dies_in_passes_that_go_into_no_step_is_replaced(use: Any, strategy: str) -> None:
    """Those who live have no step to end, and still begin again where the spare does."""
    ran = use("trailing passes", "--await-spare", 2, spares=1, failures="kill rank=1 step=2", strategy=strategy)
    ran.assert_survived(1)
    assert ran.summary["steps"] == 4
    if strategy == "rollback":
        whole = use("trailing passes")
        whole.assert_finished()
        assert {end["weights"] for end in ends(ran).values()} == {end["weights"] for end in ends(whole).values()}
        assert ran.summary["exact"] is True


@pytest.mark.parametrize("what", ["only accumulates", "updates by hand, breaks"])
def test_an_epoch_may_have_no_step_if_nothing_was_reduced_or_it_was_left_early(use: Any, what: str) -> None:
    ran = use(what)
    ran.assert_finished()
    assert ran.summary["steps"] == 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no wrap", "job.step: no model was given to job.wrap"),
        ("nests", "job.batches: an epoch is under way"),
        ("joins twice", "eg.join: this process has joined already"),
        ("every 0", "eg.join(every=0): expected a number of steps, 1 or more"),
        ("joins with a wrong keyword", "eg.join: got an unexpected keyword argument 'evry'. Did you mean 'every'?"),
        ("tracks without a name", "job.track: too many positional arguments. Expected job.track(scheduler=scheduler)"),
        ("steps a list", "job.step: expected a torch.optim.Optimizer, found list"),
        ("joins with a path", "eg.join: expected a Checkpointer, found 'runs/x'"),
        ("tracks twice", "job.track(counter=…): this name is taken"),
        ("guards nothing", "job.guard: expected once, after job.wrap"),
    ],
)
def test_a_mistake_is_not_repeated_by_restarts(use: Any, what: str, said: str) -> None:
    ran = use(what, "--checkpoints", "{folder}/ck")
    assert ran.exit_code == 2, ran.stderr
    assert said in last_line(ran)
    assert "Traceback" not in ran.stderr
    assert not ran.events("process_spawned")


def test_a_mistake_that_a_spare_is_the_first_to_make_is_said_to_be_the_spares(use: Any) -> None:
    ran = use("spare warms up", spares=1)
    assert ran.exit_code == 2, ran.stderr
    assert "spare 2: backward through the model of job.wrap without a batch of job.batches" in last_line(ran)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_of_a_copy_is_refused_with_what_to_do_instead(use: Any, ranks: int) -> None:
    ran = use("copy is wrapped", ranks=ranks)
    assert ran.exit_code == 2, ran.stderr
    assert "Build the optimizer from the wrapped model: model = job.wrap(model); optimizer = SGD(" in last_line(ran)


@pytest.mark.parametrize(
    "what",
    [
        "own optimizer",
        "own optimizer first",
        "makes optimizer state",
        "two nets",
        "unused parameters outside",
        "another optimizer",
        "head only",
    ],
)
def test_optimizers_that_are_the_scripts_own_affair_are_left_alone(use: Any, what: str) -> None:
    ran = use(what)
    ran.assert_finished()
    ran.assert_equal_weights()
    assert ran.summary["steps"] == 24


def test_a_script_that_only_evaluates_may_make_no_step(use: Any) -> None:
    ran = use("evaluates")
    ran.assert_finished()
    assert ran.summary["joined"] is True
    assert all(len(end["losses"]) == 12 for end in ends(ran).values())


def test_a_script_that_never_joins_is_said_to_have_run_as_under_torchrun(use: Any) -> None:
    ran = use("no join", failures="kill rank=1 step=5")
    assert ran.exit_code == 0, ran.stderr
    assert "finished: no rank called eg.join: ran as under torchrun (" in last_line(ran)
    assert "never happened: 'kill rank=1 step=5' (no rank called eg.join" in ran.stderr
    assert ran.summary["joined"] is False
    assert ran.summary["exact"] is None
    assert ran.summary["unverified"] == "no rank called eg.join, so nothing of the ranks was compared"


def test_a_script_that_never_joins_and_fails_is_said_not_to_have_joined(use: Any) -> None:
    ran = use("no join, rank 1 fails")
    assert ran.exit_code == 1, ran.stderr
    assert "rank 1 ended with exit code 3 before it joined: see what it printed; no rank called eg.join (" in last_line(
        ran
    )
    assert ran.summary["joined"] is False


def test_one_rank_alone_may_train_without_the_job_but_is_told_of_a_direct_step(use: Any) -> None:
    ran = use("only join", ranks=1)
    ran.assert_finished()
    assert "finished (0 steps of the job: job.step was never called, 0 failures survived, " in last_line(ran)
    assert use("optimizer.step", ranks=1).exit_code == 2


# Models that cannot be wrapped.


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fully_shard", "the model is sharded over ranks by fully_shard (FSDP2)"),
        ("FSDP", "the model is sharded over ranks by FullyShardedDataParallel"),
        ("DDP", "the model is a DistributedDataParallel already"),
        ("meta", "'0.weight' is on the meta device"),
        ("frozen", "the model has no parameter that requires a gradient"),
        ("lazy", "'weight' has no shape yet"),
        ("function", "expected a torch.nn.Module, found method"),
    ],
)
def test_a_model_that_cannot_be_wrapped_is_refused_by_a_line(use: Any, what: str, said: str) -> None:
    ran = use(what)
    assert ran.exit_code == 2, ran.stderr
    assert f"job.wrap: {said}" in last_line(ran)


def test_a_compiled_model_is_wrapped_as_any_other(use: Any) -> None:
    compiled, plain = use("compiled"), use("plain")
    compiled.assert_finished()
    assert {end["weights"] for end in ends(compiled).values()} == {end["weights"] for end in ends(plain).values()}


def test_a_part_that_is_replicated_already_is_named() -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": SingleRankDDP(nn.Linear(2, 2))})
    with pytest.raises(UsageError, match="its module 'head' is a DistributedDataParallel already"):
        refuse_model(model)
    refuse_model(nn.Linear(2, 2))


@pytest.fixture
def calls() -> Iterator[OptimizerCalls]:
    watched = OptimizerCalls(lambda: None)
    yield watched
    watched.close()


def test_optimizers_are_watched_until_it_is_closed(calls: OptimizerCalls) -> None:
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    calls.know(net)
    mine, others = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other))
    mine.step()
    assert (calls.direct, calls.in_all) == ("", 0), "without gradients nothing changes"
    for one in (net, other):
        one(torch.ones(1, 2)).sum().backward()
    calls.by_job = True
    mine.step()
    calls.by_job = False
    assert calls.direct == ""
    others.step()
    mine.step()
    assert (calls.direct, calls.others, calls.in_all) == ("SGD", 1, 2)
    with pytest.raises(UsageError, match=r"SGD\.step\(\) was called here"):
        calls.refuse_direct("here")
    calls.refuse_direct("here")
    calls.close()
    mine.step()
    assert calls.in_all == 2


# Spares.


def test_a_spare_has_a_rank_in_its_environment_that_no_rank_has(tmp_path: Path) -> None:
    settings = LaunchSettings(script=str(SCRIPT), num_ranks=3, num_spares=2)
    told = [
        environment_of(place, settings, nodes=[0] * 5, port=1, run=tmp_path, inherited={})
        for place in settings.places()
    ]
    assert [env["RANK"] for env in told] == ["0", "1", "2", "3", "4"]
    assert {env["WORLD_SIZE"] for env in told} == {"3"}
    assert ["EVERGRAD_SPARE" in env for env in told] == [False, False, False, True, True]


def test_a_script_that_looks_for_its_rank_does_not_take_a_spare_for_the_only_process(use: Any, tmp_path: Path) -> None:
    ran = use("RANK", "--out", tmp_path, "--await-spare", 2, spares=1, failures="kill rank=1 step=5")
    ran.assert_survived(1)
    assert not list(tmp_path.glob("*.master"))
    found = ends(ran)
    assert {uid: (end["master"], end["rank"], end["before"]) for uid, end in found.items()} == {
        0: (True, 0, 0),
        2: (False, 1, -1),
    }
    assert found[0]["weights"] == found[2]["weights"]
    assert ran.summary["exact"] is True


def test_the_environment_has_what_job_rank_is_when_a_script_begins_again(use: Any) -> None:
    """Rank 0 dies twice: the second time there are too few, and the script begins again with all three."""
    ran = use(
        "plain", "--checkpoints", "{folder}/ck", ranks=3, failures=["kill rank=0 step=3", "kill rank=0 step=6"],
        options=["--min-ranks", 2],
    )  # fmt: skip
    ran.assert_finished()
    found = ends(ran)
    assert len(found) == 3, ran.stderr
    assert all(end["RANK"] == str(end["rank"]) for end in found.values()), found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("spare fails", "spare 2 died (exit code 7) before it called eg.join"),
        ("spare stays out", "spare 2 ended its script before it called eg.join"),
        ("init_process_group", "spare 2 died (exit code 1) before it called eg.join"),
        ("spare fails later", "spare 2 died (exit code 7) before its first job.batches"),
    ],
)
def test_a_spare_that_ends_while_it_starts_is_reported(use: Any, what: str, said: str) -> None:
    ran = use(what, spares=1)
    ran.assert_finished()
    assert f"evergrad: {said}: it takes no rank's place. See logs/2.log" in ran.stderr
    assert ran.summary["ended_spares"] == [said]
    assert f"; {said})" in last_line(ran)


def test_of_many_spares_that_ended_the_last_line_names_three(tmp_path: Path) -> None:
    ended = tuple(f"spare {uid} died (SIGKILL) while it waited" for uid in range(2, 7))
    summary = Summary("finished", 0, "", 3, 0, 1, 1.0, tmp_path, ended_spares=ended)
    assert f"; {ended[0]}; {ended[1]}; {ended[2]}; 2 other spares ended early)" in str(summary)
    assert summary.to_json()["ended_spares"] == [*ended]


@pytest.mark.parametrize(("strategy", "exact"), [("rollback", True), ("forward", True), ("restart", False)])
def test_a_spare_takes_the_place_of_a_rank_that_leaves_exactly_where_neighbours_keep_its_state(
    use: Any, strategy: str, exact: bool
) -> None:
    ran = use(
        "plain", "--checkpoints", "{folder}/ck", "--await-spare", 2, spares=1, failures="leave rank=1 step=5",
        strategy=strategy,
    )  # fmt: skip
    ran.assert_finished()
    assert ran.summary["exact"] is exact
    if not exact:
        assert "comes from its save of step" in ran.summary["inexact"]


# What a loop may rely on.


def test_a_distributed_sampler_may_stay_as_it_is_on_ranks_and_spares(use: Any) -> None:
    plain = use("plain")
    ran = use("DistributedSampler", "--await-spare", 2, spares=1, failures="kill rank=1 step=5")
    ran.assert_survived(1)
    assert {end["weights"] for end in ends(ran).values()} == {end["weights"] for end in ends(plain).values()}
    use("DistributedSampler", ranks=1).assert_finished()


def test_the_number_of_a_batch_stays_the_same_when_its_step_is_done_again(use: Any) -> None:
    ran = use("plain", "--await-spare", 3, ranks=3, spares=1, failures="kill rank=1 step=5")
    ran.assert_survived(1)
    found = ends(ran)
    assert found[0]["batches"] == [0, 1, 2, 3, 4, 5, 5, 6, 7, *range(8)]
    assert found[3]["batches"] == [5, 6, 7, *range(8)]


@pytest.mark.parametrize(("spares", "more"), [(0, {}), (1, {"failures": "kill rank=1 step=12"})])
def test_a_policy_is_honoured_where_a_job_saves_by_itself(use: Any, spares: int, more: dict[str, str]) -> None:
    waits = ["--await-spare", 2] if spares else []
    ran = use("plain", "--checkpoints", "{folder}/ck", "--policy", 5, *waits, spares=spares, **more)
    ran.assert_finished()
    with eg.Checkpointer(ran.folder / "ck", agent=False) as ck:
        assert [version.step for version in ck.versions()][:2] == [20, 15], ran.stderr
    assert not ran.events("save_skipped")


def test_a_loader_that_keeps_its_own_place_says_that_the_job_cannot_grow(use: Any) -> None:
    ran = use("endless", ranks=1, spares=1, options=["--max-ranks", 2])
    ran.assert_finished()
    assert ran.stderr.count("evergrad: a spare waits to join, and cannot: Endless keeps its own place") == 1


def test_a_rank_that_makes_fewer_epochs_is_named_as_the_reason(use: Any) -> None:
    ran = use("rank 0 ends early")
    ran.assert_finished()
    assert ran.summary["exact"] is False
    assert "had ended the script before the others" in ran.summary["inexact"], ran.summary
    assert "ended" in ran.stderr.partition("before the others")[0], ran.stderr


@pytest.mark.parametrize("failure", ["leave rank=1 step=4", "kill rank=1 step=4"])
def test_a_loss_does_not_let_more_ranks_in_than_a_loader_that_keeps_its_own_place_was_begun_with(
    use: Any, failure: str
) -> None:
    ran = use("endless", ranks=2, spares=2, options=["--max-ranks", 4, "--fail", failure])
    ran.assert_finished()
    plans = [event["members"] for event in ran.events("plan")]
    assert len(plans) == 2, ran.stderr
    assert [len(members) for members in plans] == [2, 2], "one spare takes the place, and the other one waits on"


def test_a_model_without_other_ranks_is_a_ddp_to_whoever_asks() -> None:
    net = nn.Linear(3, 2)
    model = SingleRankDDP(net)
    assert isinstance(model, DistributedDataParallel)
    assert model.module is net
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    assert model.require_backward_grad_sync is True
    with model.no_sync():
        assert model.require_backward_grad_sync is False
    assert (model.device, model.device_ids) == (torch.device("cpu"), None)
    assert model.eval() is model
    assert not net.training
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, 3)), model(torch.ones(1, 3)))
    with pytest.raises(AttributeError, match="in_features"):
        model.in_features  # noqa: B018 (as with DDP, what is the module's is not the wrapper's)
    with pytest.raises(UsageError, match=r"job\.wrap\(model, hooks="):
        model.register_comm_hook(None, None)
