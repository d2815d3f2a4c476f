"""Kinds of failures, each in own words: the structure tells the cause; and healthy logs say nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtctl.doctor.explain import exception_classes, signatures, tracebacks
from dtctl.doctor.explain.diagnose import explain_all

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "logs" / "kinds.yaml").read_text())
CONSEQUENCES = {
    one.id
    for one in (*signatures.load_signatures(), *signatures.load_exception_kinds().values())
    if one.role == "effect"
}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_failure_is_told_by_its_kind(tmp_path: Path, case: dict[str, Any]) -> None:
    (tmp_path / "job.log").write_text(case["text"])
    explained = explain_all([tmp_path / "job.log"])
    first = explained.diagnoses[0]
    told = f"{explained.verdict} {first.id} {first.confidence} {first.ranks} {first.nodes}: {first.cause}"
    assert first.id in [case["id"], *case.get("alike", ())], told
    assert first.primary
    open_ = first.confidence == "unknown" or (first.confidence == "low" and first.id in CONSEQUENCES)
    assert explained.verdict == case.get("verdict", "failed-unknown" if open_ else "explained"), told
    for key in ("ranks", "nodes"):
        if key in case:
            assert list(getattr(first, key)) == case[key], told
    assert first.confidence == case.get("confidence", first.confidence), told
    if not case.get("skip_said"):
        assert case.get("said", "") in first.cause, told
    assert case.get("not", "\0") not in first.fix, first.fix
    assert "{" not in first.cause, told
    assert first.evidence


def test_every_kind_has_what_a_reader_needs() -> None:
    for id_, kind in signatures.load_exception_kinds().items():
        assert kind.cause, id_
        assert kind.fix, id_
        assert kind.source.startswith("https://"), id_
    both = {"host-memory", "storage-failed", "version-conflict", "bad-data"}
    assert set(signatures.load_exception_kinds()) & {one.id for one in signatures.load_signatures()} == both


WORDS = (
    "[{time}] INFO trainer: step {step} loss {loss:.4f} lr 1.0e-04 error=0.01 grad_norm {loss:.2f}",
    "[rank{rank}]: step {step} | loss: {loss:.4f} | tokens/s 12345 | errors 0 | failed 0",
    "WARNING: NaN-safe softmax is enabled; kill switch off",
    "[rank{rank}]:[W1121 10:00:00.123 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank {rank}]  using GPU "
    "{rank} to perform barrier as devices used by this process are currently unknown.",
    "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:12: FutureWarning: Non-full backward "
    "hooks are deprecated and will raise an exception in a later version.",
    '  warnings.warn("`resume_download` is deprecated and will be removed")',
    "{step:3d}%|####      | {step}/1000 [00:10<10:00,  3.20it/s, loss={loss:.3f}, timeout=600]",
    "n{rank}:991:992 [{rank}] NCCL INFO Channel 00/0 : {rank}[{rank}] -> 0[0] via P2P/CUMEM",
    "n{rank}:991:992 [{rank}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.",
    "eval: top1 error 23.1, retries 0, exceptions caught: 0, exit criteria not met",
    "INFO: flash_attn is not installed, falling back to sdpa",
    "[2026-01-05 10:00:00,123] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank {rank} "
    "Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "wandb: WARNING Config item 'lr' was locked by 'sweep' (ignored update).",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system "
    "being overloaded",
    "Special tokens have been added in the vocabulary, make sure the associated word embeddings are fine-tuned "
    "or trained.",
    "checkpoint step-{step} saved (no errors), killed stale lock",
    "Some weights of the model were not used when initializing: ['lm_head.weight']",
    "Handling out-of-memory policy: raise; abort threshold 5; signal handlers installed (SIGTERM, SIGUSR1)",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (9000 > "
    "8192). Running this sequence through the model will result in indexing errors",
    "urllib3.connectionpool - WARNING - Retrying (Retry(total=4)) after connection broken by "
    "'ReadTimeoutError': /api/models",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. "
    "Disabling parallelism to avoid deadlocks...",
    "sample: the error was that nobody had failed before; Traceback is a word too",
)
BENIGN = (
    "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>\nTraceback (most recent "
    "call last):\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1604, in __del__\n'
    "    self._shutdown_workers()\nAssertionError: can only test a child process",
    'Traceback (most recent call last):\n  File "/opt/venv/lib/python3.11/site-packages/x/y.py", line 4, in __del__\n'
    "    self.close()\nAttributeError: 'NoneType' object has no attribute 'close'",
    "--- Logging error ---\nTraceback (most recent call last):\n"
    '  File "/usr/lib/python3.11/logging/__init__.py", line 1110, in emit\n    msg = self.format(record)\n'
    "TypeError: not all arguments converted during string formatting",
    "--- Logging error ---\nTraceback (most recent call last):\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/agent/server/api.py", line 994, in f\n'
    "    store_util.barrier(\ntorch.distributed.DistNetworkError: Failed to recv, got 0 bytes.\n\n"
    "During handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n"
    '  File "/usr/lib/python3.11/logging/__init__.py", line 1110, in emit\n    msg = self.format(record)\n'
    "TypeError: not all arguments converted during string formatting\nCall stack:\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/agent/server/api.py", line 8, in f\n'
    "    logger.exception(\nMessage: 'Error waiting on exit barrier. Elapsed: %s seconds'\nArguments: (2.02,)",
    "[rank0]:[W1121 10:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
    "destroyed before we destruct ProcessGroupNCCL.",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 99 - "
    "Cannot assign requested address).",
    "n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying\n"
    "n1:1:2 [0] NCCL INFO Connected all rings",
    "n1:1:2 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared "
    "object file: No such file or directory",
    "n1:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    "Training finished.\nException in thread NetStatThr:\nTraceback (most recent call last):\n"
    '  File "/opt/venv/lib/python3.10/site-packages/wandb/sdk/wandb_run.py", line 268, in check_network_status\n'
    "    self._loop_check_status(\nBrokenPipeError: [Errno 32] Broken pipe",
    "slurmstepd: error: couldn't chdir to `/workspace': No such file or directory: going to /tmp instead",
    "[rank0]:[2025-07-31 14:52:40] n1:257:261 [0] ras/client_support.cc:160 NCCL WARN Call to bind failed: Address "
    "already in use",
    "Exception in thread Thread-1:\nTraceback (most recent call last):\n"
    '  File "/usr/lib/python3.10/threading.py", line 1016, in _bootstrap_inner\n    self.run()\n'
    '  File "/opt/venv/lib/python3.10/site-packages/tensorboardX/event_file_writer.py", line 202, in run\n'
    "    data = self._queue.get(True, queue_wait_duration)\n"
    '  File "/usr/lib/python3.10/multiprocessing/connection.py", line 136, in _check_closed\n'
    '    raise OSError("handle is closed")\nOSError: handle is closed',
    "2023-01-01 10:00:00.000000: W tensorflow/x/dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; "
    "dlerror: libnvinfer.so.7: cannot open shared object file: No such file or directory",
    "A matching Triton is not available, some optimizations will not be enabled.\n"
    "Error caught was: No module named 'triton'",
    "Installed CUDA version 11.5 does not match the version torch was compiled with 11.8 but since the APIs are "
    "compatible, accepting this combination",
    "No checkpoint found at './exp/model.pt', does not resume status!\n[2024-03-20 11:52:52,577][root][INFO] - "
    "total 1\n"
    "[2024-03-20 11:52:52,577][root][INFO] - total 2",
    "srun: job 991 queued and waiting for resources\nsrun: job 991 has been allocated resources",
)


@pytest.mark.parametrize("seed", range(60))
def test_a_healthy_log_has_no_failure(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    lines = []
    for step in range(dice.choice((20, 100, 700))):
        facts = {"step": step, "loss": dice.uniform(0.1, 9), "rank": dice.randrange(8), "time": "2026-01-05 10:00:00"}
        lines.append(dice.choice(WORDS).format(**facts))
        if dice.random() < 0.02:
            lines.append(dice.choice(BENIGN))
    lines += ["step 9998 loss 0.5", "step 9999 loss 0.5"] * 5
    if dice.random() < 0.5:
        lines.append(
            dice.choice(("Training completed. Do not forget to share your model", "done", "wandb: Run history: loss"))
        )
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    explained = explain_all([tmp_path / "job.log"])
    assert explained.verdict == "no-failure", [(one.id, one.cause, one.evidence[:1]) for one in explained.diagnoses[:2]]
    assert not any(one.primary for one in explained.diagnoses)


@pytest.mark.parametrize("line", WORDS + BENIGN)
def test_no_line_of_a_healthy_log_is_a_failure_even_alone(tmp_path: Path, line: str) -> None:
    facts = {"step": 3, "loss": 2.0, "rank": 1, "time": "2026-01-05 10:00:00"}
    (tmp_path / "job.log").write_text((line.format(**facts) if line in WORDS else line) + "\n")
    assert explain_all([tmp_path / "job.log"]).verdict == "no-failure"


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/opt/venv/lib/python3.11/site-packages/transformers/trainer.py", "transformers"),
        ("/usr/lib/python3/dist-packages/six.py", "six"),
        ("/usr/lib/python3.11/json/decoder.py", "json"),
        ("<frozen runpy>", "runpy"),
        ("/home/u/DeepSpeed/deepspeed/runtime/engine.py", "deepspeed"),
        ("/home/u/src/dtctl/dtctl/runtime/strategies/zero1.py", "dtctl"),
        ("/opt/venv/lib/python3.11/site-packages/dtctl/errors.py", "dtctl"),
        ("dtctl/supervisor/main.py", "dtctl"),
        ("/home/u/dtctl/train.py", ""),
        ("/home/u/dtctl/train/model.py", ""),
        ("/job/train.py", ""),
        ("<string>", ""),
    ],
)
def test_the_package_of_a_file(path: str, library: str) -> None:
    assert exception_classes.find_package_name(tracebacks.TracebackFrame(path=path, line=1, function="f")) == library
