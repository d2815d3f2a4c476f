"""The probe: runs from memory on a bare Python 3.8, and tells what stands in its way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.supervisor import bootstrap, frames
from dtctl.supervisor.probe import limits, pairs, places, python


def test_it_answers_from_memory_on_a_python_without_site_packages() -> None:
    sent = (
        bootstrap.build_opening_bytes("", "dtctl.supervisor.probe.main")
        + frames.pack_json({"op": "time"})
        + frames.pack_json({"op": "quit"})
    )
    command = bootstrap.format_bootstrap_command(sys.executable)
    done = subprocess.run(
        ["sh", "-c", command], input=sent, capture_output=True, check=False, cwd="/", env={}, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert [frames.decode_message(payload)["op"] for _, _, payload in frames.FrameParser().feed(done.stdout)] == [
        "time"
    ]


def test_a_call_tells_who_answers_and_that_large_packets_arrive() -> None:
    ears = pairs.ProbeListeners("b", "secret")
    port = ears.open(0)
    said = pairs.call_all([["b", "127.0.0.1", port, "data"], ["c", "127.0.0.1", port, "data"]], "secret", 5.0)
    assert [one["result"] for one in said] == ["ok", "stranger"]
    assert (said[0]["seen"], said[1]["said"]) == ("127.0.0.1", "b")
    assert ears.open(port) < 0, "the port is taken, and that is told"
    assert pairs.check_peer_connection("127.0.0.1", port, "b", "wrong", 5.0)["result"] == "stranger"
    for ear in ears.sockets:
        ear.close()


def test_a_port_on_which_nobody_listens_refuses() -> None:
    ears = pairs.ProbeListeners("b", "secret")
    port = ears.open(0)
    (ear,) = ears.sockets
    ear.shutdown(2)
    ear.close()
    assert pairs.check_peer_connection("127.0.0.1", port, "b", "secret", 5.0)["result"] == "refused"


def test_the_versions_of_torch_and_nccl_are_read_without_loading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('loaded')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1'\ncuda = '12.8'\n")
    (tmp_path / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = python.examine_job_python(sys.executable, dict(os.environ), "", [])
    assert (said["torch"], said["cuda"], said["nccl"]) == ("2.9.1", "12.8", "2.27.5")


@pytest.mark.parametrize(
    ("name", "value"), [("PYTHONHASHSEED", "abc"), ("PYTHONHOME", "/nowhere"), ("PYTHONIOENCODING", "utf-99")]
)
def test_the_variable_that_keeps_python_from_starting_is_found_by_leaving_it_out(name: str, value: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HARMLESS": "1", name: value}
    said = python.examine_job_python(sys.executable, env, "", [])
    assert said["because"] == [name]
    assert said["error"]
    assert said["python"], "what it says without that variable is kept"


@pytest.mark.slow
def test_the_variable_that_makes_python_hang_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(python, "START_LIMIT_S", 10.0)
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(tmp_path)}
    said = python.examine_job_python(sys.executable, env, "", [])
    assert (said["because"], said["error"]) == (["PYTHONPATH"], "it has not ended after 10 s")
    assert said["python"]


def test_what_hides_a_module_is_told_with_both_paths_and_what_cannot_be_hidden_is_not(tmp_path: Path) -> None:
    # The last two are there before any folder is looked through; Python 3.10 takes `os` from the folder.
    for name in ("random", "model", "sys", "os" if sys.version_info >= (3, 11) else "builtins"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    beside = [["queue", "queue.py"], ["train_utils", "train_utils.py"]]
    shadows = {
        name: (path, other)
        for name, path, other in python.examine_job_python(sys.executable, env, "", beside)["shadows"]
    }
    assert set(shadows) == {"random", "queue"}
    assert shadows["random"][0] == str(tmp_path / "random.py")
    assert shadows["random"][1].endswith("random.py")
    assert shadows["queue"][0] == "queue.py"


def test_the_home_folder_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    said = python.examine_job_python(sys.executable, {**os.environ, "HOME": str(tmp_path)}, "", [])
    assert "error" not in said
    assert said["shadows"] == []


def test_files_that_variables_name_in_vain(tmp_path: Path) -> None:
    env = {
        "HF_HOME": "/proc/hub",
        "WANDB_CACHE_DIR": str(tmp_path / "new" / "deeper"),
        "NCCL_TOPO_FILE": str(tmp_path / "topo.xml"),
        "NCCL_DEBUG_FILE": str(tmp_path / "log.%h"),
        "LD_PRELOAD": f"libc.so.6:{tmp_path}/lib.so",
        "MODEL_FILE": "relative.bin",
    }
    said = places.gather_place_facts(str(tmp_path), env)
    assert set(said["files"]) == {"HF_HOME", "NCCL_TOPO_FILE", "LD_PRELOAD"}
    assert (said["writable"], said["tmp"]["origin"]) == ("", "")
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_workdir_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder, why = places.find_usable_folder(str(tmp_path / "file" / "runs"))
    assert (folder, why) == (str(tmp_path), f"{tmp_path}/file: it is a file, not a folder")


def test_limits_of_control_groups_are_the_smallest_on_the_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/a/b\n3:cpu,cpuacct:/\n2:pids:/p\n",
        "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1048576",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/pids/p/pids.max": "20",
        "/sys/fs/cgroup/pids/p/pids.current": "15",
        "/proc/sys/net/ipv4/ip_local_port_range": "60000\t60010",
    }
    monkeypatch.setattr(limits.node_facts, "read_system_file", lambda path: files.get(path, ""))
    said = limits.gather_process_limits()
    assert (said["memory_limit"], said["cpu_quota"], said["pids_free"]) == (1048576, 0.5, 5)
    assert (said["ports"], said["memory_free"]) == ([60000, 60010], -1)
    files["/proc/self/cgroup"] = "0::/job\n"
    files |= {"/sys/fs/cgroup/job/memory.max": "max", "/sys/fs/cgroup/job/cpu.max": "max 100000"}
    assert (limits.gather_process_limits()["memory_limit"], limits.gather_process_limits()["cpu_quota"]) == (-1, -1)
    files |= {"/sys/fs/cgroup/memory.max": "4096", "/sys/fs/cgroup/job/cpu.max": "150000 100000"}
    assert (limits.gather_process_limits()["memory_limit"], limits.gather_process_limits()["cpu_quota"]) == (4096, 1.5)


def test_ports_from_all_over_a_range_are_called_without_large_packets() -> None:
    ears = pairs.ProbeListeners("b", "secret")
    ports = ears.spread(20_000, 32_767, 12)
    assert len(ports) == 12
    assert [(port - 20_000) // 1064 for port in ports] == list(range(12)), "one of each stretch"
    targets = [["b", "127.0.0.1", port, "spread"] for port in ports]
    said = pairs.call_all([*targets, ["c", "127.0.0.1", ports[0], "meeting"]], "secret", 5.0)
    assert [one["result"] for one in said] == ["ok"] * 12 + ["stranger"]
    assert len(ears.spread(20_000, 20_002, 12)) <= 3, "no more than there are"
