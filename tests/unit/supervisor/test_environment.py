"""What only the node knows is filled in on the node, and never against the user's word."""

from __future__ import annotations

from pathlib import Path

from dtctl import names
from dtctl.supervisor.environment import complete


def message(**more: object) -> dict[str, object]:
    return {"attempt": 2, "env": {}, "cwd": "/code", "peer": "", **more}


def test_folders_are_those_of_the_run() -> None:
    done = complete(message(), "/work/runs/r1")
    assert done["env"] == {
        names.RUN_DIR: "/work/runs/r1",
        names.METRICS: "/work/runs/r1/metrics.jsonl",
        names.SNAPSHOT_DIR: "/work/runs/r1/snapshots",
        names.PROGRESS: "/work/runs/r1/attempt-2/progress",
        "PET_LOG_DIR": "/work/runs/r1/attempt-2/torchrun",
    }
    assert (done["cwd"], done["interface"]) == ("/code", "")


def test_without_code_a_job_runs_in_the_home_folder() -> None:
    assert complete(message(cwd=""), "/r")["cwd"] == str(Path.home())


def test_the_interface_towards_the_peer_is_named_to_both_libraries() -> None:
    env = complete(message(peer="127.0.0.1"), "/r")["env"]
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_without_a_way_to_the_peer_no_interface_is_guessed() -> None:
    env = complete(message(peer="256.0.0.1"), "/r")["env"]
    assert "GLOO_SOCKET_IFNAME" not in env


def test_what_the_user_has_set_stays() -> None:
    own = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "mlx5", names.SNAPSHOT_DIR: "/big", "MORE": "x"}
    given = message(peer="127.0.0.1", env=own)
    done = complete(given, "/r")
    assert own.items() <= done["env"].items()
    assert given["env"] == own, "the message itself is not changed"
