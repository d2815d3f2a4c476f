"""Meaning of an exception without a signature, by its class, its error number and the code that raised it. Pure.

The code that raised an exception determines the advice: an exception in the user's own file is an error of the program;
one from a library, a file, the network, a download or an import points to these first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dtctl
from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.signatures import Signature
from dtctl.doctor.explain.tracebacks import PrintedException, TracebackFrame

_INSTALLED = re.compile(r"/(?:site|dist)-packages/(?P<name>[^/]+)")
_STANDARD = re.compile(
    r"/lib(?:64)?/python\d[\d.]*/(?P<name>[^/]+)|^[A-Za-z]:/.*/[Ll]ib/(?P<windows>[^/]+)|^<frozen (?P<frozen>[\w.]+)"
)
_ELSEWHERE = re.compile(r"^/(?:pytorch|opt/pytorch|__w/pytorch)/|^<(?!stdin|string|ipython)|/torch/(?:_C|csrc)/")
_CLONED = re.compile(
    r"/(?P<name>transformers|accelerate|peft|trl|datasets|tokenizers|deepspeed|vllm|lightning|pytorch_lightning|xformers|"
    r"flash_attn|apex|bitsandbytes|timm|diffusers|torchvision|torchaudio|ray|horovod|fairscale|triton|torch)/(?=.*\.py$)"
)
"""Pattern of libraries that often run from a clone, below a folder of the same name."""
_OWN = re.compile(r"(?:.*/)?dtctl/(?P<file>(?:\w+/)*\w+\.py)")
OWN = "dtctl"
"""Package of dtctl's own files, wherever it is installed."""
_LAUNCHER = re.compile(
    r"/bin/[\w.-]+$|/torch/distributed/(?:run|launch|launcher|elastic)|/accelerate/commands/|/deepspeed/launcher/|/torchelastic/|/multiprocessing/spawn\.py|runpy"
)
_DOWNLOADS = frozenset(
    (
        "requests",
        "urllib3",
        "urllib",
        "httpx",
        "httpcore",
        "aiohttp",
        "huggingface_hub",
        "wandb",
        "botocore",
        "boto3",
        "s3transfer",
        "fsspec",
        "s3fs",
        "gcsfs",
        "google",
        "azure",
        "modelscope",
        "http",
        "ssl",
        "mlflow",
        "comet_ml",
        "hf_transfer",
        "hf_xet",
    )
)
_HUBS = frozenset(["huggingface_hub", "transformers", "datasets", "diffusers", "torch", "torchvision", "timm", "wandb"])
"""Libraries that download, or report to a service on the internet."""
_ASKS = re.compile(r"(?:requests|urllib3|httpx|httpcore|aiohttp)\.")
"""Pattern of exceptions of clients that may ask any server."""
_NETWORK = frozenset(
    (
        "socket",
        "ssl",
        "asyncio",
        "grpc",
        "paramiko",
        "redis",
        "zmq",
    )
)
_CONFIGURATION = frozenset(
    [
        "omegaconf",
        "hydra",
        "pydantic",
        "pydantic_core",
        "yaml",
        "jsonschema",
        "yacs",
        "argparse",
        "configparser",
        "tomllib",
        "absl",
        "click",
        "typer",
        "fire",
    ]
)
_CONTENT = frozenset(
    (
        "JSONDecodeError",
        "UnicodeDecodeError",
        "UnpicklingError",
        "BadZipFile",
        "BadGzipFile",
        "LZMAError",
        "UnidentifiedImageError",
        "ArrowInvalid",
        "ParserError",
        "SafetensorError",
        "EOFError",
        "DatasetGenerationError",
        "DataFilesNotFoundError",
        "CastError",
        "LibsndfileError",
        "OSErrorTruncated",
        "DecompressionBombError",
        "ReadError",
        "TokenizerError",
    )
)
_COMPILING = ("torch._dynamo", "torch._inductor", "triton.", "torch.fx.experimental", "torch._functorch")
_READERS = frozenset(
    (
        "PIL",
        "cv2",
        "soundfile",
        "pyarrow",
        "h5py",
        "webdataset",
        "json",
        "zipfile",
        "gzip",
        "bz2",
        "lzma",
        "pickle",
        "csv",
        "tarfile",
        "pandas",
        "numpy",
        "decord",
        "av",
        "torchaudio",
        "torchcodec",
        "safetensors",
        "lmdb",
        "imageio",
        "nibabel",
        "SimpleITK",
        "pydicom",
        "rasterio",
        "tifffile",
        "skimage",
        "librosa",
        "audioread",
        "openpyxl",
        "tensorflow_datasets",
    )
)
"""Libraries that read the user's files; their exceptions concern the content."""
_CAUGHT = re.compile(r"^(?:Caught \w+ in|process \d+ terminated|-- Process)")
_LOST = frozenset(
    ("EOFError", "ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError", "FileNotFoundError")
)
"""Exceptions of multiprocessing after the end of the process on the other side."""
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
PASSING_ON = frozenset(
    [
        "ChildFailedError",
        "CalledProcessError",
        "SystemExit",
        "SubprocessError",
        "TimeoutExpired",
        "ProcessRaisedException",
        "PapermillExecutionError",
    ]
)
_PROBING = frozenset(
    (
        "KeyError",
        "AttributeError",
        "StopIteration",
        "IndexError",
        "TypeError",
        "FileNotFoundError",
        "ImportError",
        "ModuleNotFoundError",
        "ValueError",
        "NameError",
        "RuntimeError",
    )
)
_SAYING_SO = ("ValueError", "RuntimeError", "AssertionError", "Exception", "IOError", "OSError", "IndexError")
"""Exceptions that programs raise themselves for a missing file."""
_PATH = r"(?:(?:/[\w.@%+=-]+){2,}/?|[A-Za-z]:[\\/][^'\"]+)"
_GONE = re.compile(
    rf"\b(?:[Nn]o \w+(?: \w+){{0,3}} (?:found|present|available|exists?)|(?:not|n't) (?:be )?(?:found|exist)|"
    rf"[Mm]issing|[Cc]an(?:not|'t) find)\b.{{0,80}}?['\": ](?P<path>{_PATH})"
    rf"|(?P<before>{_PATH})['\"]?.{{0,20}}(?:does(?: not|n't) exist|not (?:be )?found|is missing)\b"
)
_OTHER_VERSION = re.compile(
    r"cannot import name|module '?[\w.]+'? has no attribute|type object '\w+' has no attribute|got an "
    r"unexpected keyword argument|"
    r"takes (?:from )?\d+ (?:to \d+ )?positional arguments? but|requires? \S+\s*[<>=!~]=|is required for a "
    r"normal functioning|"
    r"version.*(?:is )?(?:required|incompatible|not compatible|too old|mismatch)|does not recognize this architecture|"
    r"(?:incompatible|unsupported) (?:\w+ )?version|has been (?:removed|deprecated)|upgrade (?:your )?\w+|"
    r"missing \d+ required (?:positional|keyword-only) argument|"
    r"Can't get attribute '\w+' on <module '[\w.]+' from '[^']*(?:site|dist)-packages",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedException:
    """Exception with its meaning."""

    signature: Signature
    groups: Mapping[str, str]
    raised: PrintedException
    """Most specific exception of the chain."""
    weight: int
    """Strength: 3 a known text, 2 a kind, 1 an exception of the program, 0 of a library, -1 a consequence."""


def find_package_name(frame: TracebackFrame) -> str:
    """Return the package that a file belongs to; empty for a file of the user."""
    path = frame.path.replace("\\", "/")
    if (found := _OWN.fullmatch(path)) and _is_dtctl_file(found["file"]):
        return OWN
    if found := _INSTALLED.search(path):
        return found["name"].removesuffix(".py").partition("-")[0]
    if found := _STANDARD.search(path):
        return (found["name"] or found["windows"] or found["frozen"] or "python").removesuffix(".py")
    if _ELSEWHERE.search(path):
        return "torch"
    for found in _CLONED.finditer(path):
        above = path[: found.start()].rpartition("/")[2].lower().replace("-", "_")
        if above in ("src", "source") or found["name"] in above:  # a folder of the user may have the name of a library
            return found["name"]
    return ""


@functools.cache
def _is_dtctl_file(file: str) -> bool:
    """Return whether dtctl has such a file, since a folder of the user may have the same name."""
    return (Path(dtctl.__file__).parent / file).is_file()


def explain_exception_chain(last: PrintedException) -> ExplainedException:
    """Return the meaning of the chain that ends with this exception."""
    chain = last.chain()
    judged = [_explain_exception(raised, later) for raised, later in zip(chain, [*chain[1:], None], strict=True)]
    for judge, raised in zip(judged, chain, strict=True):
        if last.link == "inner" and raised is last:
            judged[judged.index(judge)] = ExplainedException(
                signature=judge.signature, groups=judge.groups, raised=raised, weight=-1
            )
    judged = [_of_a_server(judge, chain) for judge in judged]
    best = max(judge.weight for judge in judged)
    of_weight = [judge for judge in judged if judge.weight == best]
    if best >= 2:
        definite = [one for one in of_weight if one.signature.role == "cause" and not one.signature.ambiguous]
        return (definite or of_weight)[0]
    chosen = of_weight[0]
    if (
        len(of_weight) > 1
        and last.link == "context"
        and (chosen.raised.short in _PROBING or _is_raised_by_handler(last, chosen.raised))
        and of_weight[-1].raised is last
    ):
        # The first exception was an attempt that could fail; the program has raised the last one on purpose.
        return of_weight[-1]
    return chosen


def _of_a_server(judge: ExplainedException, chain: list[PrintedException]) -> ExplainedException:
    """Return a failed request as one to any server, if neither a library nor an address shows that it downloads."""
    packages = {find_package_name(frame) for raised in chain for frame in raised.frames}
    has_address = "://" in judge.raised.text or "host=" in judge.raised.text
    if judge.signature.id != "offline" or has_address or packages & _HUBS or not _ASKS.match(judge.raised.name):
        return judge
    signature = signatures.find_exception_kind("network-error")
    return ExplainedException(signature=signature, groups=judge.groups, raised=judge.raised, weight=2)


def _is_raised_by_handler(raised: PrintedException, handled: PrintedException) -> bool:
    """Return whether the function that has caught an exception raised another one with a message of its own."""
    if not raised.frames or not handled.frames:
        return False
    handler, at = handled.frames[0], raised.frames[-1]
    return (at.path, at.function) == (handler.path, handler.function) and at.source.startswith("raise ")


def _explain_exception(raised: PrintedException, later: PrintedException | None) -> ExplainedException:
    groups = _build_message_groups(raised, later)
    if raised.name == "an exception":
        asked = re.search(r"os\.environ\[[\"'](\w+)[\"']\]", raised.frames[-1].source + raised.frames[0].source)
        if asked is not None:  # the name of a launcher's variable is a known text
            known = signatures.find_best(f"KeyError: '{asked[1]}'")
            signature = signatures.find_exception_kind("environment-variable") if known is None else known[0]
            return ExplainedException(signature=signature, groups={**groups, "name": asked[1]}, raised=raised, weight=2)
        return ExplainedException(
            signature=signatures.find_exception_kind("traceback-cut"), groups=groups, raised=raised, weight=0
        )
    if raised.short in _LOST and raised.frames and "/multiprocessing/" in raised.frames[-1].path:
        return ExplainedException(
            signature=signatures.find_exception_kind("worker-exit"), groups=groups, raised=raised, weight=-1
        )
    known = signatures.find_best(raised.text)
    if known is not None and not (known[0].id == "missing-module" and _part_missing(raised)):
        signature, found = known
        if signature.id == "disk-full" and any(
            re.search(r"/multiprocessing/(?:synchronize|heap|shared_memory|context|queues)", frame.path)
            for frame in raised.frames[-4:]
        ):
            signature = signatures.by_id("shm-full")  # locks and shared memory lie in /dev/shm
        if signature.id == "sizes-differ" and any("collate" in f.path + f.function for f in raised.frames):
            return ExplainedException(
                signature=signatures.find_exception_kind("bad-sample"), groups=groups, raised=raised, weight=2
            )
        weight = -1 if signature.role in ("effect", "note") else 3
        if (
            raised.short in ("OSError", "EnvironmentError", "IOError")
            and signature.role == "effect"
            and not _NETWORK & {find_package_name(f) for f in raised.frames}
        ):
            weight = -1
        return ExplainedException(signature=signature, groups={**groups, **found}, raised=raised, weight=weight)
    if raised.short in _SAYING_SO and (gone := _GONE.search(raised.text)) is not None:
        path = gone["path"] or gone["before"]
        return ExplainedException(
            signature=signatures.by_id("missing-file"), groups={**groups, "path": path}, raised=raised, weight=3
        )
    id_, weight = classify_exception(raised)
    return ExplainedException(
        signature=signatures.find_exception_kind(id_), groups=groups, raised=raised, weight=weight
    )


def _part_missing(raised: PrintedException) -> bool:
    """Return whether only a submodule of an installed package is missing; otherwise Python names the package."""
    found = re.search(r"No module named '?([\w.]+)", raised.text)
    return found is not None and "." in found[1]


def _build_message_groups(raised: PrintedException, later: PrintedException | None) -> dict[str, str]:
    text = raised.message_lines if len(raised.message_lines) <= 300 else raised.message_lines[:300] + "…"
    frames = raised.frames or (later.frames if later is not None else ())
    users = [frame for frame in frames if not find_package_name(frame) and not _LAUNCHER.search(frame.path)]
    if not users and later is not None:
        users = [frame for frame in later.frames if not find_package_name(frame) and not _LAUNCHER.search(frame.path)]
    library = (
        _blamed_library(raised) or raised.name.partition(".")[0] if "." in raised.name else _blamed_library(raised)
    )
    if (part := re.search(r"No module named '?(\w+)\.", raised.text)) is not None:
        library = part[1]
    if raised.short == "AssertionError" and not raised.message and frames and frames[-1].source:
        text = f"{frames[-1].source}"
    elif not raised.message and frames and frames[-1].source.startswith(("raise", "assert")):
        text = f"{text} ({frames[-1].source})"
    where = "the line that its traceback names"
    if users:
        where = users[-1].where
    elif frames:  # the user must not correct dtctl's own files
        where = "the line of the program that calls dtctl" if find_package_name(frames[-1]) == OWN else frames[-1].where
    return {
        "text": text.rstrip(": "),
        "where": where,
        "inner": frames[-1].where if frames else "the line that its traceback names",
        "library": library or "a library",
    }


def _blamed_library(raised: PrintedException) -> str:
    for frame in reversed(raised.frames):
        library = find_package_name(frame)
        if library and (_INSTALLED.search(frame.path) or not _STANDARD.search(frame.path)):
            return library
        if not library:
            return ""
    return find_package_name(raised.frames[-1]) if raised.frames else ""


def classify_exception(raised: PrintedException) -> tuple[str, int]:  # noqa: C901 - a table in the form of questions
    """Return the id of the kind of an exception without a signature, and its weight."""
    name, text = raised.short, raised.text
    root = raised.name.partition(".")[0] if "." in raised.name else ""
    libraries = [find_package_name(frame) for frame in raised.frames]
    inner = libraries[-3:]
    own = bool(raised.frames) and not libraries[-1]
    if name in PASSING_ON or raised.name.startswith("ray.exceptions.") or _CAUGHT.match(raised.message):
        return "worker-exit", -1
    if raised.frames and _LAUNCHER.search(raised.frames[-1].path) and name in ("RuntimeError", "Exception"):
        return "worker-exit", -1
    if name in ("ImportError", "ModuleNotFoundError"):
        if _part_missing(raised):
            return "part-missing", 2
        return ("version-conflict", 2) if _OTHER_VERSION.search(text) else ("import-failed", 2)
    if name in ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "NCCLError"):
        return "distributed-error", -1
    reads_settings = {"deepspeed", "accelerate"} & set(libraries) and root == "binascii"
    if reads_settings or "path to an existing deepspeed config" in text:
        return "settings-missing", 2
    if name == "MemoryError":
        return "host-memory", 2
    if signatures.COMMUNICATION.search(text) and not own:
        return "distributed-error", -1
    if "CUDA error" in text or "cudaError" in text or "CUDA driver" in text:
        return "gpu-error", 2
    if raised.name.startswith(_COMPILING) or name in ("InductorError", "BackendCompilerFailed", "CompilationError"):
        return "compile-failed", 2
    if name == "KeyError" and raised.frames and raised.frames[-1].path.endswith(("/os.py", "<frozen os>")):
        return "environment-variable", 2
    if "is not set" in text and re.search(r"environment|\b[A-Z]{3,}(?:_[A-Z]+)+\b", text):
        return "environment-variable", 2
    if (
        (root in _DOWNLOADS and name not in ("Error", "UsageError", "ConfigError"))  # the library was used wrongly
        or name in ("HTTPError", "CommError", "HfHubHTTPError")
        or (not own and _DOWNLOADS & set(inner) and _is_os(name))
    ):
        return "download-failed", 2
    if root in _NETWORK or (
        name in ("gaierror", "ConnectionError", "TimeoutError", "herror") and _NETWORK & set(inner)
    ):
        return "network-error", 2
    if not own and raised.frames and "/torch/utils/data/" in raised.frames[-1].path and not known_as(name):
        if _is_os(name):
            return "bad-data", 2
        return "bad-sample", 2
    if (
        not own
        and set(libraries[-2:]) & _READERS
        and name
        in ("OSError", "ValueError", "RuntimeError", "KeyError", "error", "SyntaxError", "UnidentifiedImageError")
    ):
        return "bad-data", 2
    if (
        name in _CONTENT
        or root in _READERS - {"json", "pickle", "csv", "numpy", "pandas"}
        or root in ("zlib", "struct")
    ):
        return "bad-data", 2
    if root in _CONFIGURATION or (libraries and libraries[-1] in _CONFIGURATION and not own):
        return "bad-configuration", 2
    if _is_os(name) and _ERRNO.search(text):
        return "storage-failed", 2
    if libraries and libraries[-1] == OWN:
        return ("exception", 1) if root == OWN else ("dtctl-error", 2)  # errors of dtctl itself are about its input
    if (
        _OTHER_VERSION.search(text)
        and name
        in ("AttributeError", "TypeError", "ValueError", "RuntimeError", "ImportError", "KeyError", "VersionConflict")
        and _is_library_fault(raised, libraries)
    ):
        return "version-conflict", 2
    if not raised.frames:
        return "not-in-traceback", 0
    if name in _MISSING and any("/datasets/arrow_dataset.py" in frame.path for frame in raised.frames):
        return "sample-error", 1  # a function that was given to map() reads another column than there is
    if not own and name in ("KeyError", "IndexError") and raised.frames[-1].function in _LOOKING_UP:
        return "missing-key", 1
    if own and _of_a_library(raised):
        return "library-error", 0
    if own and name in _MISSING and raised.frames[-1].function in _READING:
        return "sample-error", 1
    if own:
        return "exception", 1
    if name == "AssertionError":
        return "assertion", 0
    if name == "NotImplementedError":
        return "not-supported", 0
    if _blamed_library(raised) in ("", *_STANDARD_ONLY) and any(not library for library in libraries):
        return "exception", 1
    return "library-error", 0


def _of_a_library(raised: PrintedException) -> bool:
    """Return whether a library without Python frames, such as a compiled one, has raised in the program's line."""
    root = raised.name.partition(".")[0]
    if "." not in raised.name or root == "__main__":
        return False
    return not any(
        f"/{root}/" in frame.path or frame.path.endswith(f"{root}.py")
        for frame in raised.frames
        if not find_package_name(frame)
    )


def known_as(name: str) -> bool:
    """Return whether an exception concerns a process of the data loader, and not its data."""
    return name in ("KeyboardInterrupt", "MemoryError", "ConnectionResetError", "BrokenPipeError", "EOFError")


_MISSING = ("KeyError", "IndexError", "UnicodeError")
_READING = ("__getitem__", "__iter__", "__next__", "collate_fn", "load_annotations", "load_annos", "get_item")
"""Functions of the user that read data."""
_LOOKING_UP = ("__getitem__", "__missing__", "__getattr__")
"""Functions of a library that look up a name for their caller; the caller requested a missing name."""
_STANDARD_ONLY = (
    "runpy",
    "python",
    "threading",
    "contextlib",
    "functools",
    "json",
    "re",
    "random",
    "collections",
    "enum",
    "dataclasses",
)


def _is_os(name: str) -> bool:
    return name in (
        "OSError",
        "IOError",
        "EnvironmentError",
        "TimeoutError",
        "ConnectionError",
        "InterruptedError",
    ) or name.endswith(("ConnectionError", "Timeout", "TimeoutError"))


def _is_library_fault(raised: PrintedException, libraries: list[str]) -> bool:
    """Return whether an incompatibility is in a library: it was raised there, or names a library."""
    if libraries and libraries[-1]:  # torch only passes on the arguments of a module or a function
        return not raised.frames[-1].path.endswith(("torch/nn/modules/module.py", "torch/utils/checkpoint.py"))
    named = re.search(
        r"module '([\w.]+)' has no attribute|cannot import name .* from '([\w.]+)'|on <module '([\w.]+)' from",
        raised.text,
    )
    return named is not None
