"""Facts that explain why a resume may not repeat a run. Snapshots keep them, and a resume reports the changes.

The facts decide nothing: record.py repeats steps to check whether they repeat. Settings and sizes are in the manifest,
in human-readable form. The other facts are a list, name -> value as text, in a separate part: classes, versions, the
switches of torch, digests of the user's modules and of some samples. The comparison uses the values before the first
step.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

import dtctl
from dtctl.runtime.data_loading.reading import DatasetExamination
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.own_code import digest_modules, is_own_code
from dtctl.train.batch import BatchSizes
from dtctl.train.config import TrainConfig

SAMPLE: Final = "data["
"""Prefix of a sample's name in the list."""
CODE: Final = "code of "
UNSET: Final = "unset"
"""Value of an environment variable that is not set."""
BITS_DO_NOT_DEPEND_ON: Final = (
    "best", "bind_cores", "checkpointing", "data_prefetch", "data_workers", "deterministic", "epochs", "eval_every",
    "global_batch", "log_every", "memory_gib", "mlflow", "on_nan", "on_oom", "on_resize", "profile", "require_exact",
    "snapshot", "strategy", "tensorboard", "timeout_s", "wandb",
)  # fmt: skip
"""Keys of the configuration that do not change the bits, or whose effect is covered by another run condition."""
VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "DNNL_MAX_CPU_ISA",
    "KMP_DETERMINISTIC_REDUCTION", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NCCL_ALGO", "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_PROTO",
    "NCCL_RINGS", "TORCHINDUCTOR_DETERMINISTIC", "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "RCCL_ENABLE_MSCCLPP",
    "RCCL_MSCCLPP_ENABLE", "RCCL_MSCCLPP_THRESHOLD", "RCCL_MSCCL_ENABLE", "RCCL_TREES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
)  # fmt: skip
"""Environment variables by which libraries choose how to compute and add up."""
SHOWN: Final = 4
"""Number of differences of one kind that are named; the others are only counted."""


def collect_train_settings(
    config: TrainConfig, worker: Worker, batch: BatchSizes, *, samples: int, steps: int
) -> dict[str, Any]:
    """Return the settings that people may look up in a manifest; JSON."""
    chosen = dataclasses.asdict(config)
    for key in BITS_DO_NOT_DEPEND_ON:
        del chosen[key]
    spread: dict[str, Any] = {"accumulate": batch.accumulate, "workers": worker.world_size}
    if batch.shares:
        spread["shares"] = list(batch.shares)
    if config.exact == "elastic":
        spread = {"shards": batch.accumulate * batch.world_size}
    return chosen | {
        "micro_batch": batch.micro,
        **spread,
        "steps": steps,
        "samples": samples,
        "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def collect_numeric_settings(worker: Worker, *, elastic: bool) -> dict[str, str]:
    """Return the numerical settings of this process that are not in `collect_train_settings`."""
    settings: dict[str, Any] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "dtctl": dtctl.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **read_fp32_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    if worker.device.type == "cuda":
        settings |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),
            "cudnn.allow_tf32": _read_backend_setting(lambda: torch.backends.cudnn.allow_tf32),
            "reduced precision reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }
        if not elastic:  # NCCL chooses its order of additions by the placement of the workers
            settings["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            settings["workers per node"] = worker.local_world_size
    settings |= {name: os.environ.get(name, UNSET) for name in VARIABLES}
    return {key: str(value) for key, value in settings.items()}


PRECISIONS: Final = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv",
                     "mkldnn.rnn")  # fmt: skip
"""Parts of torch.backends with an fp32_precision, since torch 2.9."""


def read_fp32_precision() -> dict[str, object]:
    """Return the settings that allow products of fp32 numbers to be rounded.

    torch refuses to read the old setting once a part has a setting of its own; then the parts are read.
    """
    found: dict[str, object] = {"float32 matmul precision": _read_backend_setting(torch.get_float32_matmul_precision)}
    for part in PRECISIONS:
        where = functools.reduce(lambda held, name: getattr(held, name, None), filter(None, part.split(".")), _BACKENDS)
        value = _read_backend_setting(functools.partial(getattr, where, "fp32_precision", "none"))
        if value != "none":
            found[f"{part}.fp32_precision".lstrip(".")] = value
    return found


_BACKENDS: Final[Any] = torch.backends


def _read_backend_setting(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # the program has mixed old and new settings
        return "set by part"


def list_versions() -> dict[str, str]:
    """Return the versions of installed packages that are loaded, from their `__version__`."""
    loaded = {name: vars(module).get("__version__") for name, module in list(sys.modules.items()) if "." not in name}
    return {name: version for name, version in loaded.items() if isinstance(version, str) and not is_own_code(name)}


def collect_program_facts(
    described: Mapping[str, str], examined: DatasetExamination, worker: Worker, *, elastic: bool
) -> dict[str, str]:
    """Return the list of facts on this worker.

    Args:
        described: classes of the program's objects.
        examined: facts about some samples.
        worker: this worker.
        elastic: True if the result must not depend on the number of workers.
    """
    facts = dict(described) | {f"{SAMPLE}{name}]": digest for name, digest in examined.digests.items()}
    facts |= {f"version of {name}": text for name, text in list_versions().items()}
    facts |= collect_numeric_settings(worker, elastic=elastic)
    facts |= {f"{CODE}{name}": digest for name, digest in digest_modules().items()}
    return facts


def compute_facts_checksum(facts: Mapping[str, str]) -> dict[str, Any]:
    """Return a short form of the facts, to compare a worker with itself: a checksum, and a digest of each sample."""
    samples = {key: value for key, value in facts.items() if key.startswith(SAMPLE)}
    rest = sorted(item for item in facts.items() if item[0] not in samples)
    return {"program": zlib.crc32(repr(rest).encode()), "samples": samples}


def is_alike(then: Any, now: Mapping[str, Any]) -> bool:
    """Return whether two checksums are of the same data; only samples that both have read are compared."""
    if not isinstance(then, Mapping):
        return False
    samples = then["samples"]
    return bool(then["program"] == now["program"]) and all(
        samples.get(key, value) == value for key, value in now["samples"].items()
    )


def describe_changed_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes that make a resume inexact, a phrase each."""
    return [f"{key} changed from {then.get(key)} to {value}" for key, value in now.items() if then.get(key) != value]


def describe_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changes among facts that both lists have; of many, the first ones and the number of the others."""
    # Left out: modules that are not loaded yet but were then, and all modules if Python's version differs, which
    # changes the byte code.
    later = [key.removeprefix(CODE) for key in then if key.startswith(CODE) and key not in now]
    now = {**now, **{f"{CODE}{name}": text for name, text in digest_modules(later).items()}}
    changed = [key for key, value in now.items() if key in then and then[key] != value]
    if "python" in changed:
        changed = [key for key in changed if not key.startswith(CODE)]
    phrases = [
        f"the {key} has changed"
        if key.startswith(CODE)
        else f"sample {key[len(SAMPLE) : -1]} of the data has other contents"
        if key.startswith(SAMPLE)
        else f"{key} changed from {then[key]} to {now[key]}"
        for key in changed
    ]
    return [*phrases[:SHOWN], *([f"and {len(phrases) - SHOWN} more"] if len(phrases) > SHOWN else [])]
