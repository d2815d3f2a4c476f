from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import PlanError
from dtctl.plan.build import PlanFacts, build, compute_spec_digest
from dtctl.plan.environment import MachineShare
from dtctl.plan.model import Plan, ThreadCount
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.facts import raises

TWO = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}], slots: 2}\n"


def plan(text: str, *, attempt: int = 0, **facts: object) -> Plan:
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))
    return build(spec, resolve_nodes(spec), run="run-1", attempt=attempt, facts=PlanFacts(**facts))  # type: ignore[arg-type]


def env(found: Plan, node: int = 0) -> dict[str, str]:
    return {variable.name: variable.value for variable in found.nodes[node].env}


@pytest.mark.parametrize(("copies", "is_noted"), [(1, False), (2, False), (3, True), (5, True)])
def test_more_copies_than_other_nodes_are_noted(copies: int, is_noted: bool) -> None:
    train = f"{{strategy: fsdp, snapshot: {{memory: {{copies: {copies}}}}}}}"
    text = f"{{cluster: {{transport: ssh, nodes: [a, b, c], slots: 1}}, job: {{script: t.py}}, train: {train}}}"
    assert any("memory.copies" in note for note in plan(text).notes) is is_noted


def test_torchrun() -> None:
    found = plan(TWO + "job: {script: train.py, args: [--lr, '1']}")
    assert found.world_size == 4
    assert [list(node.ranks) for node in found.nodes] == [[0, 1], [2, 3]]
    port = found.rendezvous.port
    assert found.nodes[1].argv == (
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--rdzv-id=run-1.0",
        "--master-addr=10.0.0.1",
        f"--master-port={port}",
        "--max-restarts=0",
        "--tee=3",
        "train.py",
        "--lr",
        "1",
    )
    assert "RANK" not in env(found)
    assert env(found)["DTCTL_RUN_ID"] == "run-1"


def test_a_named_python_runs_its_own_torchrun() -> None:
    argv = plan(TWO.replace("slots", "python: /venv/bin/python, slots") + "job: {module: train}").nodes[0].argv
    assert argv[:3] == ("/venv/bin/python", "-m", "torch.distributed.run")
    assert argv[-2:] == ("-m", "train")


def test_direct_sets_the_ranks_itself_and_allows_unequal_slots() -> None:
    unequal = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1, slots: 3}, {name: b, slots: 1}]}\n"
    found = plan(unequal + "job: {script: train.py, kind: direct}")
    assert [node.processes for node in found.nodes] == [3, 1]
    assert found.nodes[1].first_rank == 3
    assert found.nodes[0].argv == ("python3", "-u", "train.py")
    assert env(found)["WORLD_SIZE"] == "4"
    assert env(found, 1)["LOCAL_WORLD_SIZE"] == "1"
    assert env(found, 1)["MASTER_ADDR"] == "10.0.0.1"


def test_torchrun_refuses_unequal_slots_and_says_what_to_do() -> None:
    with pytest.raises(PlanError) as caught:
        plan("cluster: {transport: ssh, nodes: [{name: a, slots: 3}, {name: b, slots: 1}]}\njob: {script: t.py}")
    assert (
        caught.value.message == "kind torchrun needs the same number of slots on every node, and these have a: 3, b: 1"
    )
    assert "kind: direct" in (caught.value.hint or "")


def test_automatic_slots_follow_the_gpus() -> None:
    text = TWO.replace(", slots: 2", "") + "job: {script: t.py, kind: direct}"
    assert plan(text).world_size == 2
    assert plan(text, gpus={"a": 8, "b": 0}).world_size == 9
    assert any("slots: auto" in note for note in plan(text).notes)


@pytest.mark.parametrize(("train", "told"), [("strategy: auto", True), ("strategy: ddp", False), ("steps: 1", False)])
def test_a_strategy_that_workers_decide_is_noted(train: str, told: bool) -> None:
    notes = plan(f"{{cluster: {{nodes: [a]}}, job: {{script: t.py}}, train: {{{train}}}}}").notes
    assert any("strategy: auto is decided by the workers" in note for note in notes) is told


def test_a_new_attempt_has_a_new_rendezvous() -> None:
    first, second = plan(TWO + "job: {script: t.py}"), plan(TWO + "job: {script: t.py}", attempt=1)
    assert first.rendezvous.run_id != second.rendezvous.run_id
    assert first.rendezvous.port != second.rendezvous.port
    assert plan(TWO + "job: {script: t.py}") == first  # the same question has the same answer


def test_ports_lie_outside_the_range_that_the_kernel_uses() -> None:
    assert all(20_000 <= plan(TWO + "job: {script: t.py}", attempt=n).rendezvous.port < 32_768 for n in range(50))


def test_variables_know_where_they_come_from() -> None:
    found = plan(
        TWO.replace("address: 10.0.0.2", "address: 10.0.0.2, env: {A: node}")
        + "job: {script: t.py, env: {A: job}, env_from: ['WANDB_*']}",
        environ={"WANDB_MODE": "offline", "HOME": "/root"},
    )
    origins = {variable.name: (variable.value, variable.origin) for variable in found.nodes[1].env}
    assert origins["A"] == ("node", "cluster.nodes: b")
    assert origins["WANDB_MODE"] == ("offline", "job.env_from: WANDB_*")
    assert "HOME" not in origins
    assert env(found)["A"] == "job"


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "WORLD_SIZE", "DTCTL_RUN_ID"])
def test_what_gives_a_worker_its_place_cannot_be_set(name: str) -> None:
    with raises(PlanError, f"{name}"):
        plan(TWO + f"job: {{script: t.py, env: {{{name}: 1}}}}")


def test_a_name_that_no_shell_can_export() -> None:
    with raises(PlanError, "A-B variable"):
        plan(TWO + "job: {script: t.py, env: {A-B: 1}}")


def test_secrets_are_named_and_never_held() -> None:
    found = plan(
        TWO + "job: {script: t.py, secrets: [KEY], env_from: ['K*', 'OTHER']}", environ={"KEY": "hunter2", "OTHER": "1"}
    )
    assert found.secrets == ("KEY",)
    assert "hunter2" not in repr(found)


def test_the_train_section_travels_as_json() -> None:
    found = plan(TWO + "job: {script: t.py}\ntrain: {lr: 0.1, model: {layers: 2}}")
    assert env(found)["DTCTL_TRAIN_CONFIG"] == '{"lr":0.1,"model":{"layers":2}}'


def test_a_named_interface_is_exact_for_nccl() -> None:
    found = plan(TWO + "job: {script: t.py}\nnetwork: {interface: {a: eth0, b: ib0}}")
    assert (env(found)["GLOO_SOCKET_IFNAME"], env(found)["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    assert env(found, 1)["NCCL_SOCKET_IFNAME"] == "=ib0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job: {}", "nothing run"),
        ("job: {command: [a], kind: torchrun}", "script module"),
    ],
)
def test_jobs_that_cannot_be(text: str, message: str) -> None:
    with raises(PlanError, message):
        plan(TWO + text)


def test_local_is_one_machine() -> None:
    with raises(PlanError, "machine alone"):
        plan("cluster: {nodes: [a, b]}\njob: {script: t.py}")


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_ranks_are_dense_and_in_the_order_of_the_nodes(slots: list[int]) -> None:
    entries = ", ".join(f"{{name: n{index}, slots: {count}}}" for index, count in enumerate(slots))
    found = plan(
        f"cluster: {{transport: ssh, nodes: [{entries}]}}\njob: {{script: t.py, kind: direct}}", address="10.0.0.1"
    )
    assert [rank for node in found.nodes for rank in node.ranks] == list(range(sum(slots)))


def test_the_digest_tells_specs_apart() -> None:
    one = parse_spec("job: {script: a.py}", source="x", base_dir=Path("/a"))
    two = parse_spec("job: {script: b.py}", source="x", base_dir=Path("/a"))
    assert compute_spec_digest(one) == compute_spec_digest(one.model_copy(update={"base_dir": Path("/b")}))
    assert compute_spec_digest(one) != compute_spec_digest(two)


def test_an_ipv6_endpoint_has_brackets() -> None:
    found = plan(TWO + "job: {script: t.py}").rendezvous
    assert replace(found, address="fd00::1", port=1).endpoint == "[fd00::1]:1"


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        ("script: train.py, kind: direct", ("numpy",)),
        ("script: train.py, kind: direct, preload: [json]", ("json",)),
        ("script: train.py, kind: direct, preload: []", ()),
        ("script: train.py, kind: direct, setup: ['export CUDA_VISIBLE_DEVICES=$LOCAL_RANK']", ()),
        ("module: my.train, kind: direct, preload: [json]", ("json",)),
        ("command: [./a.out], kind: direct, preload: [json]", ()),
        ("script: train.py, preload: [json]", ()),
    ],
)
def test_workers_of_a_node_share_what_they_import(job: str, wanted: tuple[str, ...]) -> None:
    found = plan(TWO + f"job: {{{job}}}", source="import numpy")
    assert [node.preload for node in found.nodes] == [wanted, wanted]


@pytest.mark.parametrize(("restarts", "wanted"), [(0, ()), (1, ("numpy",))])
def test_a_single_worker_shares_with_its_successor(restarts: int, wanted: tuple[str, ...]) -> None:
    one = TWO.replace("slots: 2", "slots: 1")
    found = plan(one + f"job: {{script: t.py, kind: direct, max_restarts: {restarts}}}", source="import numpy")
    assert found.nodes[0].preload == wanted


def test_a_value_that_is_not_text_is_refused_by_its_name() -> None:
    with raises(PlanError, "UTF-8") as caught:
        plan(TWO + "job: {script: t.py, env_from: ['X*']}", environ={"X": "a\udcff"})
    assert caught.value.where == "job.env_from: X*"


def threads(text: str, **facts: object) -> list[tuple[str, str]]:
    """Value and origin of OMP_NUM_THREADS on every node that has it."""
    return [
        (variable.value, variable.origin)
        for node in plan(text, **facts).nodes
        for variable in node.env
        if variable.name == "OMP_NUM_THREADS"
    ]


@pytest.mark.parametrize(
    ("slots", "share", "value", "reason"),
    [
        (1, MachineShare(cores=2, nodes=3), "1", "3 nodes of 1 worker share this machine's 2 cores"),
        (1, MachineShare(cores=16, nodes=2), "8", "2 nodes of 1 worker share this machine's 16 cores"),
        (2, MachineShare(cores=16, nodes=3), "2", "3 nodes of 2 workers share this machine's 16 cores"),
        (4, MachineShare(cores=12, nodes=1), "3", "4 workers share this machine's 12 cores"),
        (4, MachineShare(cores=1, nodes=1), "1", "4 workers share this machine's 1 core"),
    ],
)
def test_workers_on_one_machine_share_its_cores(slots: int, share: MachineShare, value: str, reason: str) -> None:
    text = f"cluster: {{transport: sandbox, nodes: 2, slots: {slots}}}\njob: {{script: t.py}}"
    assert threads(text, share=share) == [(value, f"dtctl: {reason}")] * 2


def test_a_worker_that_has_the_machine_to_itself_keeps_what_torch_chooses() -> None:
    text = "cluster: {transport: local, slots: 1}\njob: {script: t.py}"
    assert threads(text, share=MachineShare(cores=8, nodes=1)) == []


def test_threads_that_the_user_has_set_win() -> None:
    text = "cluster: {transport: local, slots: 2}\njob: {script: t.py}"
    shell = MachineShare(cores=8, nodes=1, threads="7")
    assert threads(text, share=shell) == [("7", "set in the launching shell")]
    spec = text.replace("t.py", "t.py, env: {OMP_NUM_THREADS: 5}")
    assert threads(spec, share=shell) == [("5", "job.env")]


UNEQUAL = "cluster: {transport: ssh, nodes: [{name: a, slots: 2}, {name: b, slots: 4}]}\n"


@pytest.mark.parametrize(
    ("cores", "number", "reason"),
    [
        ({"a": 16, "b": 16}, 4, "4 workers share the 16 cores of b, the smallest share of all nodes"),
        ({"a": 3, "b": 64}, 1, "2 workers share the 3 cores of a, the smallest share of all nodes"),
        ({"a": 1, "b": 1}, 1, "4 workers share the 1 core of b, the smallest share of all nodes"),
    ],
)
def test_all_workers_have_the_threads_that_the_fullest_node_can_give(
    cores: dict[str, int], number: int, reason: str
) -> None:
    text = UNEQUAL + "job: {script: t.py, kind: direct}"
    value = f"${{OMP_NUM_THREADS:-{number}}}"
    assert threads(text, cores=cores) == [(value, f"dtctl: {reason}, unless the node sets it")] * 2
    made = plan(text, cores=cores)
    assert made.threads == ThreadCount(number=number, reason=reason)
    assert not any("OMP_NUM_THREADS" in note for note in made.notes)


def test_threads_stay_those_of_the_first_attempt() -> None:
    text = UNEQUAL + "job: {script: t.py, kind: direct}"
    first = ThreadCount(number=7, reason="of nodes that were there")
    assert plan(text, cores={"a": 16, "b": 16}, threads=first).threads == first
    assert {value for value, _ in threads(text, threads=first)} == {"${OMP_NUM_THREADS:-7}"}


def test_cores_that_are_not_known_yet_are_told_so() -> None:
    text = TWO + "job: {script: t.py}"
    assert threads(text) == threads(text, cores={"a": 8}) == threads(text, cores={"a": 8, "b": 0}) == []
    assert any("OMP_NUM_THREADS" in note for note in plan(text).notes)
    own = text.replace("t.py", "t.py, env: {OMP_NUM_THREADS: 5}")
    assert threads(own, cores={"a": 8, "b": 8}) == [("5", "job.env")] * 2
    assert not any("OMP_NUM_THREADS" in note for note in plan(own).notes)


PYTHON = TWO.replace("slots", "python: ~/venv/bin/python, slots")


def test_the_folder_of_the_named_python_comes_first_on_the_path_of_a_command() -> None:
    assert plan(PYTHON + "job: {command: [python3, train.py]}").nodes[0].path == "~/venv/bin"
    assert plan(TWO + "job: {command: [python3, train.py]}").nodes[0].path == ""
    assert plan(PYTHON + "job: {script: train.py}").nodes[0].path == ""


def test_a_shell_line_is_run_by_a_shell_with_its_arguments() -> None:
    node = plan(TWO + "job: {shell: true, command: 'cd a && ./b \"$@\"', args: [1, 2]}").nodes[0]
    assert node.argv == ("bash", "-e", "-o", "pipefail", "-c", 'cd a && ./b "$@"', "bash", "1", "2")
    with pytest.raises(PlanError, match="arguments"):
        plan(TWO + "job: {shell: true, command: ./b, args: [1]}")


@pytest.mark.parametrize(
    ("script", "source", "argv"),
    [
        ("run.sh", "", ("bash", "run.sh", "1")),
        ("run.sh", "#!/bin/sh -e\ntrue", ("/bin/sh", "-e", "run.sh", "1")),
        ("run", "#!/usr/bin/env -S perl -w\n", ("perl", "-w", "run", "1")),
        ("train", "#!/usr/bin/env python3\n", ("python3", "-u", "train", "1")),
        ("train.py", "#!/bin/bash\n", ("python3", "-u", "train.py", "1")),
    ],
)
def test_a_script_is_run_by_its_own_interpreter(script: str, source: str, argv: tuple[str, ...]) -> None:
    text = TWO + f"job: {{script: {script}, args: [1], kind: direct}}"
    assert plan(text, source=source).nodes[0].argv == argv


def test_a_script_that_is_not_python_is_run_once_per_node() -> None:
    found = plan(TWO + "job: {script: run.sh}")
    assert (found.kind, found.nodes[0].processes) == ("command", 1)
    assert any("bash" in note for note in found.notes)
    with pytest.raises(PlanError, match="torchrun starts a Python script") as caught:
        plan(TWO + "job: {script: run.sh, kind: torchrun}")
    assert "job.kind: command" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("slurm", "kind", "words"),
    [
        ("gres: gpu:8", "torchrun", "8 workers of a node share one core"),
        ("gres: gpu:8", "direct", "each worker gets one core"),
        ("gres: gpu:8, cpus_per_task: 64", "torchrun", ""),
        ("gres: gpu:8, exclusive: true", "torchrun", ""),
        ("gres: gpu:8, extra: {cpus-per-gpu: 8}", "torchrun", ""),
        ("time: '1:00'", "torchrun", ""),
    ],
)
def test_gpus_without_cores_are_noted(slurm: str, kind: str, words: str) -> None:
    notes = plan(
        f"{{cluster: {{transport: slurm, nodes: 2}}, job: {{script: t.py, kind: {kind}}}, slurm: {{{slurm}}}}}"
    ).notes
    found = [note for note in notes if "slurm.cpus_per_task" in note]
    assert len(found) == bool(words)
    assert all(words in note for note in found)
