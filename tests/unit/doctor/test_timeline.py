"""Order of what a log says: errors lead, and not what launchers print afterwards; a class is no cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtctl.doctor.explain.diagnose import explain_all
from dtctl.doctor.explain.diagnosis import Diagnosis, Explanation

CANCELLED = "slurmstepd: error: *** STEP 991.0 ON n1 CANCELLED AT 2026-01-05T10:00:00 ***\n"
TIME_LIMIT = "slurmstepd: error: *** JOB 991 ON n1 CANCELLED AT 2026-01-05T10:00:00 DUE TO TIME LIMIT ***\n"
STOPPED = "W0105 10:00:00.1 12 torch/distributed/elastic/api.py:9] Sending process 13 closing signal SIGTERM\n"
CONTAINER = "slurmstepd: error: pyxis: container start failed with error code: 137\n"
EXIT_CODE = "srun: error: n1: task 0: Exited with exit code 1\n"
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 17912 got signal: 15\n"
AFTERWARDS = (CANCELLED, TIME_LIMIT, STOPPED, CONTAINER, EXIT_CODE, SIGNALLED)
NCCL = "n1:10:20 [0] misc/socket.cc:483 NCCL WARN "
ERRORS = {
    "peer-closed": NCCL + "socketProgress: Connection closed by remote peer n2<34567>\n"
    "n1:10:20 [0] proxy.cc:1485 NCCL WARN [Service thread] Error encountered progressing operation=Connect, res=3\n",
    "nccl-error": NCCL + "Error: the proxy gave no answer\nn1:10:20 [0] init.cc:1 NCCL WARN Error while creating it\n",
    "ib-retry-exceeded": NCCL
    + "NET/IB : Got completion from peer 10.0.0.2<5> with status=12 opcode=129 len=6 vendor err 129\n",
    "unknown": "ERROR zorblax: flux capacitor exceeded 88 mph\n",
    "unknown ": NCCL + "Accept from peer 3 gave nothing\n",
    "missing-file": "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'\n",
}


def explained(folder: Path, text: str) -> Explanation:
    (folder / "job.log").write_text(text)
    return explain_all([folder / "job.log"])


def first(folder: Path, text: str) -> Diagnosis:
    return explained(folder, text).diagnoses[0]


@pytest.mark.parametrize("afterwards", AFTERWARDS, ids=range(len(AFTERWARDS)))
@pytest.mark.parametrize("error", ERRORS)
def test_what_is_printed_afterwards_never_outranks_an_error_before_it(
    tmp_path: Path, error: str, afterwards: str
) -> None:
    found = first(tmp_path, "step 1 loss 2.0\n" + ERRORS[error] + afterwards)
    assert found.id == error.strip(), found.cause
    assert found.primary


@pytest.mark.parametrize("between", ["n1:10:20 [0] NCCL INFO transport/net.cc:1393 -> 5\n", "reading\n" * 9])
def test_ordinary_lines_do_not_show_that_a_warning_of_nccl_was_survived(tmp_path: Path, between: str) -> None:
    assert first(tmp_path, ERRORS["unknown "] + between + TIME_LIMIT).id == "unknown"
    assert first(tmp_path, ERRORS["unknown "] + "step 9 loss 1.0\n" + TIME_LIMIT).id == "time-limit"


@pytest.mark.parametrize("words", ["Message truncated : received", "message truncated : receiving"])
def test_sizes_that_differ_are_known_in_both_forms(tmp_path: Path, words: str) -> None:
    found = first(tmp_path, f"{NCCL}NET/Socket : peer 10.0.0.2<5> {words} 8 bytes instead of 4.\n" + TIME_LIMIT)
    assert (found.id, found.nodes) == ("nccl-settings-differ", ("n1",))


def test_the_rank_of_a_process_that_deepspeed_lost_is_read(tmp_path: Path) -> None:
    text = "[ERROR] [launch.py:324:sigkill_handler] ['python', 'a.py', '--local_rank=3'] exits with return code = -9\n"
    assert first(tmp_path, text).ranks == (3,)


@pytest.mark.parametrize("afterwards", [CANCELLED, TIME_LIMIT])
def test_without_an_error_before_it_what_the_scheduler_prints_leads(tmp_path: Path, afterwards: str) -> None:
    lost = ERRORS["peer-closed"]
    for text in (afterwards, "step 1 loss 2.0\n" + afterwards + lost):
        assert first(tmp_path, text).id in ("cancelled", "time-limit")


def test_times_of_several_files_tell_what_was_printed_afterwards(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2026-01-05 09:59:01 " + ERRORS["peer-closed"])
    (tmp_path / "0.log").write_text("2026-01-05 10:00:00 " + CANCELLED)
    assert explain_all([tmp_path]).diagnoses[0].id == "peer-closed"


SIGNALS = {
    4: ("SIGILL", "crashed", "instruction"),
    8: ("SIGFPE", "signalled", "calculation"),
    5: ("SIGTRAP", "signalled", "trap"),
    10: ("SIGUSR1", "signalled", "SIGUSR1"),
    12: ("SIGUSR2", "signalled", "SIGUSR2"),
    14: ("SIGALRM", "signalled", "alarm"),
    24: ("SIGXCPU", "signalled", "processor time"),
    25: ("SIGXFSZ", "signalled", "size of a file"),
    31: ("SIGSYS", "signalled", "system call"),
}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    "form",
    [
        "E0105 10:00:00.1 12 torch/api.py:874] failed (exitcode: -{number}) local_rank: 0 (pid: 12) of binary: p\n",
        "  traceback : Signal {number} ({name}) received by PID 12\n",
        "  exitcode  : -{number} (pid: 12)\n",
        "ERROR:composer.cli.launcher:Rank 5 crashed with exit code -{number}.\n",
    ],
)
def test_each_signal_is_itself(tmp_path: Path, form: str, number: int) -> None:
    name, id_, said = SIGNALS[number]
    found = first(tmp_path, form.format(name=name, number=number))
    assert (found.id, found.confidence) == (id_, "low")
    assert said in found.cause
    assert name in found.cause
    assert ("instruction that this processor" in found.cause) is (number == 4)


FAMILY = NCCL + "ncclSocketInit: connecting to address with family {family} is neither AF_INET(2) nor AF_INET6(10)\n"


@pytest.mark.parametrize("family", [0, 33022])
def test_an_address_that_nccl_cannot_read_has_several_causes(tmp_path: Path, family: int) -> None:
    text = FAMILY.format(family=family)
    assert first(tmp_path, text).confidence == "ambiguous"
    none = "n1:10:20 [0] NCCL INFO Bootstrap : no socket interface found\n"
    assert first(tmp_path, none + text).id == "no-interface"


TWO_VERSIONS = (
    "n1:10:10 [0] NCCL INFO NCCL version 2.20.5+cuda12.4\nn2:11:11 [0] NCCL INFO NCCL version 2.19.3+cuda12.3\n",
    "n1:10:10 [0] NCCL INFO NCCL_VERSION 22005\nn2:11:11 [0] NCCL INFO NCCL_VERSION 21903\n",
    "nvidia-nccl-cu12==2.20.5\nnvidia-nccl-cu12==2.19.3\n",
    "[rank0]: unhandled system error, NCCL version 2.20.5\n[rank1]: unhandled system error, NCCL version 2.19.3\n",
    "loaded /opt/a/lib/libnccl.so.2.20.5\nloaded /usr/local/nccl2/lib/libnccl.so.2.17.1\n",
)


@pytest.mark.parametrize("versions", TWO_VERSIONS)
@pytest.mark.parametrize(
    "error",
    [FAMILY.format(family=0), NCCL + "Message truncated : received 2048 bytes instead of 256\n", ERRORS["nccl-error"]],
)
def test_two_versions_in_one_text_explain_what_nccl_could_not(tmp_path: Path, error: str, versions: str) -> None:
    for text in (versions + error, error + versions):
        found = first(tmp_path, text)
        assert found.id == "nccl-version-mismatch", found.cause
        assert "2.20.5" in found.cause
        assert found.confidence in ("medium", "high")


def test_two_versions_explain_nothing_else(tmp_path: Path) -> None:
    text = TWO_VERSIONS[0] + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    assert first(tmp_path, text).id == "cuda-oom"


BY_TORCH = """Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    main()
  File "/job/train.py", line 2, in main
    dist.all_reduce(x)
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2, in all_reduce
    work.wait()
RuntimeError: {text}
"""
FROM_COLLECTIVES = (
    (
        "[../third_party/gloo/gloo/transport/tcp/buffer.cc:81] Application timeout caused pair closure",
        "gloo-timeout",
    ),
    ("Application timeout caused pair closure", "gloo-timeout"),
    ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:9] frobnication of the pair ended", "distributed-error"),
    ("[gloo/transport/uv/pair.cc:9] Wait timeout", "gloo-timeout"),
    ("ProcessGroupUCC: the endpoint is gone", "distributed-error"),
)


@pytest.mark.parametrize(("text", "id_"), FROM_COLLECTIVES)
def test_what_a_library_of_collectives_raises_accuses_nobody(tmp_path: Path, text: str, id_: str) -> None:
    found = first(tmp_path, BY_TORCH.format(text=text))
    assert found.id == id_
    assert found.confidence in ("ambiguous", "low")


CLASSES_ALONE = (
    'Traceback (most recent call last):\n  File "/job/t.py", line 3, in <module>\n    f()\nValueError: x\n',
    'Traceback (most recent call last):\n  File "/job/t.py", line 3, in <module>\n    f()\n  File "/opt/lib/python3.11/'
    'site-packages/frob/a.py", line 2, in f\n    raise ValueError("x")\nValueError: x\n',
    "KeyError: 'labels'\n",
    "failed (exitcode: -11) local_rank: 1 (pid: 7) of binary: /usr/bin/python\n",
    "failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: /usr/bin/python\n",
    "failed (exitcode: -7) local_rank: 1 (pid: 7) of binary: /usr/bin/python\n",
)


@pytest.mark.parametrize("text", CLASSES_ALONE, ids=range(len(CLASSES_ALONE)))
def test_a_class_or_a_signal_alone_is_low_quotes_its_lines_and_accuses_nobody(tmp_path: Path, text: str) -> None:
    found = first(tmp_path, text)
    assert found.confidence == "low"
    assert found.evidence
    for accusation in ("correct the program", "the program raised", "faulty"):
        assert accusation not in found.cause + found.fix
    assert explained(tmp_path, text).verdict == "explained"


def test_two_sources_that_agree_are_high(tmp_path: Path) -> None:
    process = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    kernel = "Jan  5 10:00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=12, MMU Fault\n"
    assert first(tmp_path, process).confidence == "medium"
    assert first(tmp_path, kernel + process).confidence == "high"


ENDED_WELL = (
    "step 9 loss 1.0\ntraining finished\n",
    "100%|██████████| 500/500 [10:00<00:00,  3.20it/s, loss=1.0]\nsrun: Job step 991.0 exited with exit code 0\n",
    "{'train_runtime': 60.1, 'train_samples_per_second': 9.1, 'train_loss': 1.0, 'epoch': 3.0}\n",
    "step 9 loss 1.0\nState: COMPLETED (exit code 0)\n",
)
NOISE = (
    "", CANCELLED, STOPPED, ERRORS["peer-closed"], SIGNALLED, CONTAINER,
    "terminate called without an active exception\n",
    'Exception ignored in: <function F.__del__ at 0x7>\nTraceback (most recent call last):\n  File "/a.py", line 3, in '
    "__del__\nTypeError: 'NoneType' object is not callable\n",
)  # fmt: skip


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
@pytest.mark.parametrize("end", ENDED_WELL, ids=range(len(ENDED_WELL)))
def test_a_run_that_ended_well_has_no_failure_whatever_comes_after(tmp_path: Path, end: str, noise: str) -> None:
    found = explained(tmp_path, "step 8 loss 1.1\n" + end + noise)
    assert found.verdict == "no-failure", found.diagnoses[0].cause


def test_a_script_that_goes_on_long_after_a_part_of_it_ended_well_may_fail(tmp_path: Path) -> None:
    for more in ("reading a shard\n" * 99, "step 9 loss 1.0\n" * 9):
        text = "preprocessing exited with exit code 0\n" + more + TIME_LIMIT
        assert first(tmp_path, text).id == "time-limit"
        assert explained(tmp_path, text).verdict == "explained"


def test_a_bar_that_is_full_is_no_end_of_a_run(tmp_path: Path) -> None:
    text = "100%|██████████| 500/500 [10:00<00:00,  3.20it/s]\n" + CLASSES_ALONE[0]
    assert explained(tmp_path, text).verdict == "explained"


def collectives(last: dict[int, int], world: int) -> str:
    said = "".join(
        f"[rank{rank}]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=10, NumelOut=10, Timeout(ms)=600000) ran for "
        "600071 milliseconds before timing out.\n"
        for rank, number in last.items()
    )
    return f"world_size={world}\n" + said


def test_all_ranks_in_one_collective_that_none_finished_means_the_way_between_them(tmp_path: Path) -> None:
    found = first(tmp_path, collectives(dict.fromkeys(range(4), 91), 4))
    assert (found.id, found.confidence, found.ranks) == ("collective-unfinished", "medium", ())
    assert first(tmp_path, collectives(dict.fromkeys(range(4), 91), 8)).id == "watchdog-timeout"
    assert first(tmp_path, collectives({0: 91, 1: 91, 2: 91, 3: 90}, 4)).id == "rank-behind"


def test_facts_next_to_an_error_say_which_of_its_meanings_it_has(tmp_path: Path) -> None:
    device = "RuntimeError: CUDA error: invalid device ordinal\n"
    table = "  rank      : {rank} (local_rank: {local})\n  exitcode  : 1 (pid: 12)\n"
    assert "global rank" in first(tmp_path, f"[rank9]: {device}" + table.format(rank=9, local=1)).cause
    assert "more workers than" in first(tmp_path, f"[rank5]: {device}" + table.format(rank=5, local=5)).cause
    keys = (
        "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: {}\n"
        "\tUnexpected key(s) in state_dict: {}\n"
    )
    wrapped = keys.format('"fc.weight", "fc.bias".', '"module.fc.weight", "module.fc.bias".')
    assert "module." in first(tmp_path, wrapped).cause
    cache = "FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.triton/cache/abc/kernel.so'\n"
    assert first(tmp_path, cache).id == "compile-cache"
    native = (
        "frame #3: ibv_poll + 0x1 (0x7f in /usr/lib/libibverbs.so.1)\nfailed (exitcode: -11) local_rank: 1 (pid: 7)\n"
    )
    assert "libibverbs" in first(tmp_path, native).cause
    said = "[rank0]: ERROR the vocabulary of the tokenizer is empty\n[rank0]: " + CLASSES_ALONE[0].replace(
        "\n", "\n[rank0]: "
    )
    assert "vocabulary of the tokenizer" in first(tmp_path, said).cause


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        (
            "RuntimeError: [../gloo/gloo/transport/tcp/socket.cc:9] rv != -1. connect: Network is unreachable\n",
            "no-route",
        ),
        ("[1579.838] [n1:1:2] ucp_rkey.c:250  UCX  ERROR Failed to unpack remote key: Input/output error\n", "unknown"),
        (NCCL + "Call to ibv_reg_mr failed with error Bad address\n", "ib-local-protection"),
        (NCCL + "nvmlDeviceGetHandleByPciBusId() failed: Not Found\n", "nvml"),
        ("Error loading model:  CUDA out of memory. Tried to allocate 1008.00 MiB. GPU 0 has 14 GiB\n", "cuda-oom"),
        (": [rank18]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", "cuda-oom"),
    ],
)
def test_words_about_files_and_downloads_mean_something_else_between_processes(
    tmp_path: Path, text: str, id_: str
) -> None:
    found = first(tmp_path, text)
    assert found.id == id_
    assert found.ranks == ((18,) if "rank18" in text else ())


def test_a_container_that_cannot_be_started_is_told_with_its_reason(tmp_path: Path) -> None:
    text = CONTAINER + "slurmstepd: error: pyxis:   nvidia-container-cli: container error: permission denied\n"
    assert "permission denied" in first(tmp_path, text).cause
