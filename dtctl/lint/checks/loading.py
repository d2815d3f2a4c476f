"""Rules about what ranks read: DT038, DT040, DT052."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import Check
from dtctl.lint.flow import function_of, origins
from dtctl.lint.model import Problem
from dtctl.lint.ranks import by_launcher, for_one_process, for_some, mentions_rank
from dtctl.lint.source_file import Function, SourceFile, constant, key, keyword

_OF_A_MODULE = frozenset("eval train cuda to half parameters state_dict module forward modules".split())
_DATASETS = re.compile(r"(?:torchvision|torchaudio|torchtext)\.datasets\.\w+(?:\.\w+)?\Z")
_MODELS = re.compile(r"torchvision\.models\.(?:\w+\.)*[a-z]\w*\Z")


def whole_module(check: Check) -> Iterator[Problem]:
    """DT038."""
    module = check.module
    for call in module.calls_of("torch.load"):
        if keyword(call, "weights_only") is not None or any(argument.arg is None for argument in call.keywords):
            continue
        if _used_as_module(module, call):
            yield check.problem("DT038", call, "a whole module is loaded: torch.load refuses it since torch 2.6")


def _used_as_module(module: SourceFile, call: ast.Call) -> bool:
    """Whether what is loaded is itself used as a module, or a module is an item of it."""
    above: ast.AST = call
    parent = module.parents.get(above)
    while isinstance(parent, ast.Subscript) and parent.value is above:
        above, parent = parent, module.parents.get(parent)
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("eval", "cuda", "half", "parameters", "train")
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return False
    name = key(parent.targets[0])
    if name is None:
        return False
    scope = module.scope(call)
    for use in module.nodes_of(ast.Attribute):
        if key(use.value) != name or module.scope(use) is not scope or use.lineno < call.lineno:
            continue
        current = module.current(use.value, use)
        if use.attr in ("eval", "parameters", "train") and current is not None and current.statement is parent:
            return isinstance(module.parents.get(use), ast.Call)
    return False


def unmapped(check: Check) -> Iterator[Problem]:
    """DT052."""
    module = check.module
    if not module.calls_of("torch.load") or "cuda" not in module.text:
        return
    if not check.project.distributed(module) or check.project.framework(module):
        return
    for call in module.calls_of("torch.load"):
        given = {argument.arg for argument in call.keywords}
        if len(call.args) != 1 or given & {"map_location", None, "mmap"} or for_some(module, call) is not None:
            continue
        if mentions_rank(module, call.args[0]) or _data(check, call) or for_one_process(module, call):
            continue
        yield check.problem("DT052", call, "torch.load without map_location: every rank loads to the GPU that saved it")


def _data(check: Check, call: ast.Call) -> bool:
    """Whether what is loaded is data rather than the state of a training, as the names and the place say."""
    module = check.module
    owner = module.enclosing(call, (ast.ClassDef,))
    if isinstance(owner, ast.ClassDef) and re.search(
        r"Data|Loader|Sampler", owner.name + " ".join(map(ast.unparse, owner.bases))
    ):
        return True
    statement = module.statement(call)
    text = ast.unparse(call.args[0]) + (ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else "")
    return (
        re.search(r"data|feat|embed|token|label|audio|wav|image|latent|vocab|dict\b(?<!state_dict)", text) is not None
    )


def downloaded_by_all(check: Check) -> Iterator[Problem]:
    """DT040."""
    module = check.module
    if (not module.trains and not next(_downloads(module), None)) or not check.project.distributed(module):
        return
    if check.project.framework(module):
        return
    if module.trains or not check.project.importers(module):
        for call, name, weights in _downloads(module):
            if _one_first(module, call) or by_launcher(module, call):
                continue
            message = "the pretrained weights are" if weights else f"`{name}` is"
            yield check.problem(
                "DT040",
                call,
                f"{message} downloaded by every rank, into one folder",
                severity="info" if weights else None,
            )
    # In a function of a file that knows nothing of ranks: reported where the training calls it.
    for name in sorted(module.methods) if module.trains else ():
        if not re.search(r"data|load|build|get|make|create|prepare|train|test|set", name, re.IGNORECASE):
            continue
        for call in module.methods[name]:
            target = function_of(module, call)
            if target is None or target.module is module or target.module.trains:
                continue
            inside = [
                dataset for download, dataset, weights in _downloads(target.module)
                if target.module.scope(download) is target.node
                and not weights and not _one_first(target.module, download)
            ]  # fmt: skip
            if inside and not _one_first(module, call) and not by_launcher(module, call):
                yield check.problem("DT040", call, f"`{inside[0]}` is downloaded by every rank, into one folder")


def _downloads(module: SourceFile) -> Iterator[tuple[ast.Call, str, bool]]:
    """Calls that download: (call, what is called, whether it is weights, which torch.hub puts in place at once)."""
    for name, calls in sorted(module.calls.items()):
        short = name.rpartition(".")[2]
        hub = name in ("torch.hub.load", "torch.hub.load_state_dict_from_url", "torch.utils.model_zoo.load_url")
        weights = _MODELS.match(name) is not None
        for call in calls:
            download = keyword(call, "download")
            wanted = constant(download) is True and download is not None
            by_position = _DATASETS.match(name) is not None and _download_by_position(call)
            if (wanted or by_position) and short[:1].isupper():
                yield call, short, False
            elif hub or (weights and _pretrained(call)):
                yield call, short, True
    for calls in module.methods.values():
        for call in calls:
            download = keyword(call, "download")
            if constant(download) is True and download is not None and module.name(call.func) is None:
                short = key(call.func) or "this dataset"
                if short.rpartition(".")[2][:1].isupper() or isinstance(call.func, ast.Subscript):
                    yield call, short, False


def _pretrained(call: ast.Call) -> bool:
    pretrained, weights = keyword(call, "pretrained"), keyword(call, "weights")
    if pretrained is None and weights is None and call.args:
        pretrained = call.args[0]
    return constant(pretrained) is True or (weights is not None and constant(weights) != "" and not (
        isinstance(weights, ast.Constant) and weights.value is None
    ))  # fmt: skip


def _download_by_position(call: ast.Call) -> bool:
    """MNIST(root, train, transform, target_transform, download)."""
    return len(call.args) > 4 and constant(call.args[4]) is True


def _one_first(module: SourceFile, call: ast.Call) -> bool:
    """Whether one rank does it alone, or before the others: under a condition, or next to a barrier."""
    if for_some(module, call) is not None:
        return True
    function = module.scope(call)
    barriers = module.calls.get("torch.distributed.barrier", ())
    if any(module.scope(barrier) is function and for_some(module, barrier, 0) is not None for barrier in barriers):
        return True
    if isinstance(function, Function) and module.neighbours is not None:
        callers = module.neighbours.callers(module, function)
        if any(_waits_nearby(caller, calling) for caller, calling in callers[:8]):
            return True
    # A second call of the same dataset that one rank makes before.
    name = key(call.func)
    return any(
        other is not call and key(other.func) == name and other.lineno < call.lineno and for_some(module, other)
        for other in module.methods.get((name or "").rpartition(".")[2], ())
    )


def _waits_nearby(module: SourceFile, call: ast.Call) -> bool:
    function = module.scope(call)
    return any(
        module.scope(barrier) is function and for_some(module, barrier, 0) is not None
        for barrier in module.calls.get("torch.distributed.barrier", ())
    )


def is_made_of(module: SourceFile, node: ast.expr, name: str) -> bool:
    """Whether a value comes from a call of a resolved name."""
    return any(
        isinstance(value.node, ast.Call) and value.module.name(value.node.func) == name
        for value in origins(module, node)
    )


CHECKS = (whole_module, unmapped, downloaded_by_all)
