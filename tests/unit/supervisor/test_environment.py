"""What only the node knows is filled in on the node, and never against the user's word."""

from __future__ import annotations

from dtctl import names
from dtctl.folders import choose_memory_folder
from dtctl.supervisor.environment import build_attempt_variables, drop_step_variables
from dtctl.supervisor.messages.attempt import StartAttempt


def start(env: dict[str, str] | None = None) -> StartAttempt:
    return StartAttempt(
        run="r1", token="t", attempt=2, script="", workers=[], split_ranks=False, env=env or {}, peer="",
        grace_s=1.0, keep=False, link_timeout_s=10.0,
    )  # fmt: skip


def test_folders_are_those_of_the_run() -> None:
    assert build_attempt_variables(start(), "/work/runs/r1", "") == {
        names.RUN_DIR: "/work/runs/r1",
        names.METRICS: "/work/runs/r1/metrics.jsonl",
        names.SNAPSHOT_DIR: "/work/runs/r1/snapshots",
        names.MEMORY_DIR: choose_memory_folder("/work/runs/r1"),
        names.PROGRESS: "/work/runs/r1/attempt-2/progress",
        names.GRACE_S: "1",
        "PET_LOG_DIR": "/work/runs/r1/attempt-2/torchrun",
    }


def test_the_interface_towards_the_peer_is_named_to_both_libraries() -> None:
    env = build_attempt_variables(start(), "/r", "lo")
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_what_the_user_has_set_stays() -> None:
    own = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "mlx5", names.SNAPSHOT_DIR: "/big", "MORE": "x"}
    assert own.items() <= build_attempt_variables(start(own), "/r", "lo").items()


def test_workers_have_no_numbers_of_a_step_of_slurm() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_JOB_ID": "7"}
    assert drop_step_variables(environ) == {"SLURM_JOB_ID": "7"}
