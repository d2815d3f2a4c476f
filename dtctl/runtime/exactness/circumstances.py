"""All that the bits of a training depend on, beside its state: a snapshot keeps it, and a resume says what is another.

Settings and sizes are in the manifest, where people read them. The rest is a long list, path -> value as text, in a
part of its own: classes and attributes of model, loss, optimizer and data set, digests of code and of some samples, the
switches of torch, versions. What is compared is what the list had before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import dtctl
from dtctl.runtime.data_loading.reading import DatasetExamination
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.program.code import code_digest, is_own_code, module_name
from dtctl.train.batch import Batch
from dtctl.train.config import TrainConfig

SAMPLE: Final = "data["
"""Before the name of a sample in the long list."""
BITS_DO_NOT_DEPEND_ON: Final = (
    "best",
    "bind_cores",
    "checkpointing",
    "data_prefetch",
    "data_workers",
    "deterministic",
    "epochs",
    "eval_every",
    "global_batch",
    "log_every",
    "memory_gib",
    "mlflow",
    "on_nan",
    "on_oom",
    "on_resize",
    "profile",
    "require_exact",
    "snapshot",
    "strategy",
    "tensorboard",
    "timeout_s",
    "wandb",
)
"""Keys of the configuration: what they come to is a circumstance of its own, or nothing."""
VARIABLES: Final = (
    *(
        "ATEN_CPU_CAPABILITY",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_LAUNCH_BLOCKING",
        "DNNL_MAX_CPU_ISA",
        "KMP_DETERMINISTIC_REDUCTION",
    ),
    *(
        "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS",
        "NCCL_ALGO",
        "NCCL_COLLNET_ENABLE",
        "NCCL_CROSS_NIC",
        "NCCL_MAX_NCHANNELS",
    ),
    *(
        "NCCL_MIN_NCHANNELS",
        "NCCL_NTHREADS",
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
        "NCCL_RINGS",
        "TORCHINDUCTOR_DETERMINISTIC",
        "NVIDIA_TF32_OVERRIDE",
        "ONEDNN_MAX_CPU_ISA",
    ),
    *("RCCL_ENABLE_MSCCLPP", "RCCL_MSCCLPP_ENABLE", "RCCL_MSCCLPP_THRESHOLD", "RCCL_MSCCL_ENABLE", "RCCL_TREES"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
)
"""Environment variables by which libraries choose how to compute or to add up."""
SHOWN: Final = 4
"""Differences of one kind that are named; of more, their number."""


def settings(config: TrainConfig, worker: Worker, batch: Batch, *, samples: int, steps: int) -> dict[str, Any]:
    """What people may want to read in a manifest; JSON."""
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


def numerics(worker: Worker, *, elastic: bool) -> dict[str, str]:
    """How this process computes and adds up, beside what `settings` has."""
    settings: dict[str, Any] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "dtctl": dtctl.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        **fp32_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    if worker.device.type == "cuda":
        settings |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),
            "cudnn.allow_tf32": _setting(lambda: torch.backends.cudnn.allow_tf32),
            "reduced precision reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }
        if not elastic:  # how NCCL adds up follows from where the workers are
            settings["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            settings["workers per node"] = worker.local_world_size
    settings |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {key: str(value) for key, value in settings.items()}


PRECISIONS: Final = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv",
                     "mkldnn.rnn")  # fmt: skip
"""Parts of torch.backends that have an fp32_precision, since torch 2.9."""


def fp32_precision() -> dict[str, object]:
    """How products of fp32 numbers may be rounded.

    torch refuses to read the old setting once a part was set to something of its own; then the parts count.
    """
    found: dict[str, object] = {"float32 matmul precision": _setting(torch.get_float32_matmul_precision)}
    for part in PRECISIONS:
        where = functools.reduce(lambda held, name: getattr(held, name, None), filter(None, part.split(".")), _BACKENDS)
        value = _setting(functools.partial(getattr, where, "fp32_precision", "none"))
        if value != "none":
            found[f"{part}.fp32_precision".lstrip(".")] = value
    return found


_BACKENDS: Final[Any] = torch.backends


def _setting(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # old and new settings were mixed
        return "set by part"


def code(before: Iterable[str] = ()) -> dict[str, str]:
    """A digest of every module of the user's own that is loaded; comments and line numbers do not count.

    Args:
        before: names of modules that a run had loaded; they are looked at even if this one has not loaded them yet.
    """
    loaded = [name for name in list(sys.modules) if is_own_code(name)]
    digests = {}
    for name in dict.fromkeys([*loaded, *(name for name in before if name not in sys.modules)]):
        held = _code_of(name)
        if held is not None:
            digests[module_name(name)] = code_digest(held)
    return digests


def _code_of(name: str) -> types.CodeType | None:
    path = getattr(sys.modules.get(name), "__file__", None)
    try:
        if name == "__main__":
            return compile(Path(path).read_bytes(), "main", "exec", dont_inherit=True) if path else None
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        return spec.loader.get_code(name)
    except (ImportError, OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def versions(described: Mapping[str, str]) -> dict[str, str]:
    """The versions of the packages whose classes a description names."""
    packages = {text.split(".")[0] for key, text in described.items() if key.endswith("(class)") and "." in text}
    return {package: version for package in packages - {"torch"} if (version := _version(package)) is not None}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def detail(
    described: Mapping[str, str], examined: DatasetExamination, worker: Worker, *, elastic: bool
) -> dict[str, str]:
    """The long list, of this worker.

    Args:
        described: classes and attributes of what takes part, by path (program/state.py).
        examined: some samples.
        worker: this worker.
        elastic: whether the number of workers does not count.
    """
    facts = dict(described) | {f"data[{name}]": digest for name, digest in examined.digests.items()}
    facts |= {f"version of {name}": text for name, text in versions(described).items()}
    facts |= numerics(worker, elastic=elastic)
    facts |= {f"code of {name}": digest for name, digest in code().items()}
    return facts


def checksum(facts: Mapping[str, str]) -> dict[str, Any]:
    """A list in short, by which workers are compared with themselves: one number, and a digest of each sample."""
    samples = {key: value for key, value in facts.items() if key.startswith(SAMPLE)}
    rest = sorted(item for item in facts.items() if item[0] not in samples)
    return {"program": zlib.crc32(repr(rest).encode()), "samples": samples}


def is_alike(then: Any, now: Mapping[str, Any]) -> bool:
    """Whether two checksums tell of the same; of samples, as far as both were read."""
    if not isinstance(then, Mapping):
        return False
    samples = then["samples"]
    return bool(then["program"] == now["program"]) and all(
        samples.get(key, value) == value for key, value in now["samples"].items()
    )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What makes going on not exact, one phrase each."""
    return [f"{key} changed from {then.get(key)} to {value}" for key, value in now.items() if then.get(key) != value]


def differences_in_detail(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The same of the long list; of many that changed alike, the first ones and how many there are."""
    if then.get("python") != now.get("python"):  # whose byte code is another for the same text
        then, now = _without_code(then), _without_code(now)
    now = dict(now) | {f"code of {name}": text for name, text in _later(then, now).items()}
    phrases = []
    for key in dict.fromkeys([*then, *now]):
        was, has = then.get(key), now.get(key)
        if was == has or (key.startswith(SAMPLE) and (was is None or has is None)):  # some are read in time, some not
            continue
        if key.endswith("(code)") or key.startswith("code of "):
            phrases.append(
                f"{key.removesuffix(' (code)')} has other code" if key.endswith("(code)") else f"the {key} has changed"
            )
        elif key.startswith(SAMPLE):
            phrases.append(f"sample {key[5:-1]} of the data has other contents")
        elif was is None or has is None:
            phrases.append(f"{key} is new: {has}" if was is None else f"{key} is gone: it was {was}")
        else:
            phrases.append(f"{key} changed from {was} to {has}")
    return [*phrases[:SHOWN], *([f"and {len(phrases) - SHOWN} more"] if len(phrases) > SHOWN else [])]


def _without_code(listed: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in listed.items() if not key.endswith("(code)") and not key.startswith("code of ")}


def _later(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Digests of modules that are not loaded yet, and were when the list was made."""
    names = {key.removeprefix("code of ") for key in then if key.startswith("code of ") and key not in now}
    return {name: digest for name, digest in code(names).items() if name in names} if names else {}
