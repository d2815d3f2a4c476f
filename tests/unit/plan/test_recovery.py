"""What a spec comes to when a worker is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.errors import PlanError
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import Plan
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.facts import missing


def planned(
    job: str = "", *, train: str = "train: {strategy: ddp}", slots: int = 2, kind: str = "direct", source: str = ""
) -> Plan:
    text = f"cluster: {{transport: local, slots: {slots}}}\njob: {{script: t.py, kind: {kind}{job}}}\n{train}\n"
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path("/nowhere"))
    return build(spec, resolve_nodes(spec), run="r", facts=PlanFacts(source=source))


def test_live_is_said_and_the_workers_are_forked_from_a_warm_process() -> None:
    plan = planned(", recovery: live, preload: [torch]", slots=2)
    assert plan.live
    assert any("job.recovery" in note for note in plan.notes)
    assert plan.nodes[0].preload == ("torch",)


@pytest.mark.parametrize("recovery", ["auto", "restart"])
def test_without_restarts_a_lost_worker_ends_the_run(recovery: str) -> None:
    plan = planned(f", recovery: {recovery}")
    assert not plan.live
    assert missing("\n".join(plan.notes), "0 max_restarts") == []


def test_with_restarts_auto_is_live_wherever_it_can_be() -> None:
    plan = planned(", max_restarts: 2")
    assert plan.live
    assert missing("\n".join(plan.notes), "replaced auto") == []
    plan = planned(", recovery: restart, max_restarts: 2")
    assert not plan.live
    assert missing("\n".join(plan.notes), "2 restart snapshot") == []
    plan = planned(", max_restarts: 2", train="train: {strategy: fsdp}")
    assert not plan.live
    assert missing("\n".join(plan.notes), "2 restart fsdp") == []


@pytest.mark.parametrize("train", ["", "train: {strategy: ddp}"])
@pytest.mark.parametrize("recovery", ["auto", "live", "restart"])
def test_a_loop_of_its_own_is_restarted_and_the_plan_says_so(train: str, recovery: str) -> None:
    if recovery == "live" and not train:
        pytest.skip("refused: live recovery needs a section `train`")
    job = f", recovery: {recovery}, max_restarts: 2"
    note = "\n".join(planned(job, train=train, source="from dtctl.runtime import Trainer, session\n").notes)
    assert missing(note, "restart all 2 workers snapshot") == []
    assert recovery == "restart" or missing(note, "t.py loop own dtctl.runtime.session") == []
    assert "replaced while" not in note
    other = "\n".join(planned(job, train=train, source="from other import session\n").notes)
    assert "loop of its own" not in other


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "torchrun"},
        {"train": ""},
        {"slots": 1},
        {"train": "train: {strategy: fsdp}"},
        {"train": "train: {strategy: {dp: 1, fsdp: 2}}"},
        {"train": "train: {strategy: ddp, shares: {localhost: 2}}"},
        {"train": "train: {exact: elastic}"},
        {"train": "train: {snapshot: {replicas: 1}}"},
    ],
    ids=["torchrun", "no runtime", "alone", "fsdp", "mesh", "shares", "elastic", "replicas"],
)
def test_what_cannot_be_live_is_refused_with_what_to_do(change: dict[str, object]) -> None:
    with pytest.raises(PlanError) as caught:
        planned(", recovery: live", **change)  # type: ignore[arg-type]
    assert caught.value.where == "job.recovery"
    assert caught.value.hint


def test_auto_and_names_of_axes_are_left_to_the_workers() -> None:
    assert planned(", recovery: live", train="train: {strategy: auto}").live
    assert planned(", recovery: live", train="train: {strategy: {dp: -1}}").live


@pytest.mark.parametrize("degrees", ["{dp: 2, fsdp: -1}", "{dp: 2, ep: -1}", "{dp: 2, fsdp: 2, ep: 2}"])
def test_shards_and_experts_of_which_there_is_a_replica_can_be_live(degrees: str) -> None:
    assert planned(", recovery: live", train=f"train: {{strategy: {degrees}}}", slots=8).live


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        ("{ep: 4}", "experts replica"),
        ("{fsdp: 2, ep: 2}", "experts replica"),
        ("{fsdp: 4}", "shards replica"),
        ("{dp: 2, tp: 2}", "tp"),
        ("zero1", "zero1 optimizer"),
    ],
)
def test_who_has_no_replica_is_told_what_would_be_lost(strategy: str, held: str) -> None:
    plan = planned(", max_restarts: 1", train=f"train: {{strategy: {strategy}}}", slots=4)
    assert not plan.live
    [note] = [note for note in plan.notes if "lost worker" in note]
    assert missing(note, f"{held} restart") == []


def in_a_job(job: str = "", slurm: str = "", nodes: str = "nodes: 2, slots: 2") -> Plan:
    text = (
        f"cluster: {{transport: slurm, {nodes}}}\njob: {{script: t.py, kind: direct, max_restarts: 2{job}}}\n{slurm}\n"
    )
    spec = parse_spec(text + "train: {strategy: ddp}\n", source="dtctl.yaml", base_dir=Path("/nowhere"))
    return build(spec, resolve_nodes(spec), run="r", facts=PlanFacts())


def test_under_slurm_it_is_live_as_elsewhere() -> None:
    for asked in ("", ", recovery: auto", ", recovery: live"):
        assert in_a_job(asked).live
    plan = in_a_job(", recovery: restart")
    assert not plan.live
    assert missing("\n".join(plan.notes), "4 restart snapshot") == []


@pytest.mark.parametrize(
    "change",
    [
        {"slurm": "slurm: {container: {image: a}}"},
        {"slurm": "slurm: {srun: [--mpi=pmix]}"},
        {"slurm": "slurm: {launcher: none}"},
    ],
    ids=["container", "srun", "plain mode"],
)
def test_what_a_job_cannot_do_is_refused_and_left_by_itself(change: dict[str, str]) -> None:
    plan = in_a_job(**change)
    assert not plan.live
    assert [note for note in plan.notes if "replaces lost ones" in note]
    with pytest.raises(PlanError, match="cannot be replaced") as caught:
        in_a_job(", recovery: live", **change)
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"slurm": "slurm: {array: 0-3}"}, {"nodes": "nodes: [{name: big, slots: 2}, {name: small, slots: 1}]"}],
    ids=["array", "unequal nodes"],
)
def test_a_job_of_any_shape_is_live(change: dict[str, str]) -> None:
    assert in_a_job(**change).live
