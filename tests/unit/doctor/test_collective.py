"""Whom the nodes' own words blame when a collective fails."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

from dtctl.doctor.checks import collective
from dtctl.doctor.checks.collective import (
    check_loaded_nccl,
    check_sums_within_nodes,
    find_faulty_nodes,
    is_all_reduce_correct,
    merge_worker_reports,
)
from dtctl.doctor.node_probes import NodeProbes, NodeQuery
from dtctl.supervisor.probe.child import JobPythonProcess
from dtctl.transport.base import Target
from dtctl.transport.local import LocalTransport

DONE: dict[str, Any] = {"stage": "done", "wrong": 0, "final": True}
LATE: dict[str, Any] = {"stage": "group", "wrong": 0, "error": "Timed out", "final": True}


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ({"a": DONE, "b": {**DONE, "wrong": 4}, "c": DONE}, ("b",)),
        ({"a": LATE, "b": {**LATE, "silent": True}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {"error": "it has ended with status -9", "complained": "", **LATE}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {**LATE, "stage": "start"}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": {}, "c": LATE}, ("b",)),
        ({"a": LATE, "b": LATE, "c": LATE}, ()),
        ({"a": {**DONE, "wrong": 1}, "b": {**DONE, "wrong": 1}}, ()),
        ({"a": LATE, "b": {**LATE, "silent": True}, "c": {**LATE, "silent": True}}, ()),
    ],
)
def test_the_node_that_differs_is_named_and_nobody_where_all_say_the_same(
    answers: dict[str, Any], named: tuple[str, ...]
) -> None:
    assert not is_all_reduce_correct(answers)
    assert find_faulty_nodes(answers) == named


def test_all_is_well_when_all_come_to_the_end_with_the_right_sums() -> None:
    assert is_all_reduce_correct({"a": DONE, "b": DONE})


def child(program: str) -> JobPythonProcess:
    return JobPythonProcess([sys.executable, "-u", "-c", program], {"WORD": "x"})


def test_a_child_answers_in_lines_of_which_the_last_is_final() -> None:
    echo = child(
        "import json,os,sys\nfor line in sys.stdin:\n print('{\"a\": 1}')\n"
        " print(json.dumps({**json.loads(line), 'word': os.environ['WORD'], 'final': True}))"
    )
    assert echo.exchange_message({"b": 2}, 10.0) == {"a": 1, "b": 2, "word": "x", "final": True}
    echo.kill()


@pytest.mark.slow
def test_a_child_that_says_nothing_more_is_ended_in_time() -> None:
    silent = child('import time; print(\'{"stage": "start"}\', flush=True); time.sleep(100)')
    assert silent.exchange_message({}, 2.0) == {"stage": "start", "silent": True, "complained": ""}


def test_a_child_that_ends_leaves_its_last_words() -> None:
    said = child("raise SystemExit('no disk')").exchange_message({}, 10.0)
    assert said == {"error": "it has ended with status 1", "complained": "no disk"}


def test_of_a_traceback_the_line_with_the_exception_counts() -> None:
    said = child("raise ValueError('\\nInvalid log settings: loud, must be\\nregistered names')").exchange_message(
        {}, 10.0
    )
    assert said["complained"] == "ValueError: Invalid log settings: loud, must be registered names"


def test_an_nccl_that_is_not_the_one_of_the_wheel_is_named() -> None:
    good = ("2.27.3", "2.27.3")
    assert list(check_loaded_nccl({"a": good, "b": good, "c": ("", "2.20.5"), "d": ("2.27.3", "")})) == []
    assert list(check_loaded_nccl({"a": ("2.27.3.post1", "2.27.3")})) == []
    (one,) = check_loaded_nccl({"a": good, "b": ("2.27.3", "2.18.5")})
    assert (one.check, one.status, one.nodes) == ("nccl", "fail", ("b",))
    assert one.evidence == ("b: installed 2.27.3, loaded 2.18.5",)
    (every,) = check_loaded_nccl({"a": ("2.27.3", "2.18.5")})
    assert every.status == "warn", "alike everywhere: odd, and it may work"


SUM: dict[str, Any] = {**DONE, "seconds": 0.5, "bytes": 1024}


def test_workers_of_a_node_say_one_thing() -> None:
    assert merge_worker_reports(SUM) == SUM
    assert merge_worker_reports({"each": [SUM, {**SUM, "seconds": 0.7}]}) == {
        "stage": "done", "wrong": 0, "seconds": 0.7, "bytes": 1024,
    }  # fmt: skip
    found = merge_worker_reports({"each": [SUM, {**LATE, "error": "NCCL error"}, {**SUM, "wrong": 3}]})
    assert (found["stage"], found["wrong"], found["error"]) == ("group", 3, "worker 1: NCCL error")
    assert "seconds" not in found
    assert not is_all_reduce_correct({"a": found})
    lost = merge_worker_reports({"each": [SUM, {"silent": True, "complained": ""}]})
    assert (lost["silent"], lost["complained"], "stage" in lost) == (True, "", False)
    assert find_faulty_nodes(
        {"a": merge_worker_reports({"each": [SUM, SUM]}), "b": lost, "c": merge_worker_reports({"each": [SUM, SUM]})}
    ) == ("b",)
    assert merge_worker_reports({"each": []})["silent"]


def test_gpus_that_do_not_add_up_within_their_node_are_its_own_matter() -> None:
    assert list(check_sums_within_nodes({"a": SUM, "b": SUM}, {"a": 8, "b": 8})) == []
    (one,) = check_sums_within_nodes({"a": SUM, "b": LATE}, {"a": 8, "b": 8})
    assert (one.check, one.status, one.nodes) == ("gpu-nccl", "fail", ("b",))
    assert "shm" in one.fix


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a probe ends after its link
def test_several_workers_of_each_node_add_up_together_and_apart() -> None:
    names = ("a", "b")
    queries = [
        NodeQuery(target=Target(name=name, address="127.0.0.1"), python=sys.executable, workdir="~") for name in names
    ]
    with contextlib.closing(NodeProbes(queries, LocalTransport(), progress=lambda _: None)) as probes:
        seen = probes.collect_reports(rendezvous=(), data_ports=0, measure_s=0.0)
        for one in seen:
            one.data_address = "127.0.0.1"
        gang = collective._CollectiveWorkers(
            probes, seen, backend="gloo", progress=lambda _: None, counts={"a": 2, "b": 1},
            python=dict.fromkeys(names, sys.executable),
            env={name: {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} for name in names},
        )  # fmt: skip
        loaded = gang.start(names)
        assert {name: one["stage"] for name, one in loaded.items()} == {"a": "torch", "b": "torch"}
        together = gang.round(names)
        assert is_all_reduce_correct(together), together
        # Of workers that are apart each node's have a world, and a port, of their own; here both would take one.
        alone = gang.run_all_reduce_per_node(["a"])
        assert is_all_reduce_correct(alone), alone
        assert {*alone} == {"a"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ImportError: /tmp/lib/libstdc++.so.6: file too short", "LD_LIBRARY_PATH"),
        ("ValueError: TORCH_LOGS has no such value", "TORCH_LOGS"),
        ("Invalid log settings: loud, must be a comma separated list", "TORCH_LOGS"),
        ("it is too louder", ""),
        ("ImportError: /usr/lib/libstdc++.so.6: file too short", ""),
        ("", ""),
    ],
)
def test_a_torch_that_does_not_load_names_the_variable_that_led_there(text: str, named: str) -> None:
    variables = {"a": {"LD_LIBRARY_PATH": "/opt/cuda/lib:/tmp/lib/", "TORCH_LOGS": "loud", "NCCL_DEBUG": "WARN"}}
    found = collective._no_torch({"a": {"error": text}}, variables)
    assert (found.fix.startswith(f"take {named} out") and bool(named)) or (not named and "job's Python" in found.fix)
