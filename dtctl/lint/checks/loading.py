"""Rules about files that ranks read: DT038, DT040, DT052."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_called_function, find_value_origins, list_mapping_items
from dtctl.lint.model import Problem
from dtctl.lint.ranks import is_launcher_code, is_single_process_code, mentions_rank, resolve_rank_guard
from dtctl.lint.source_file import (
    SourceFile,
    find_callers,
    find_keyword_value,
    format_dotted_name,
    list_contexts,
    name_other_lines,
    read_assigned_name,
    read_constant_value,
)

_DATASETS = re.compile(r"(?:torchvision|torchaudio|torchtext)\.datasets\.\w+(?:\.\w+)?\Z")
_MODULE = re.compile(r"(?:^|_|\.)(?:model|net|network|module)\Z")
_SETTINGS = ("args", "self.args", "opt", "self.opt", "flags", "hparams")
_STATES_OF_MODELS = frozenset(
    ("model", "state_dict", "net", "model_state_dict", "ema", "model_ema", "teacher", "student")
)
"""Keys that also occur in files of weights from other sources."""
_MODELS = re.compile(r"torchvision\.models\.(?:\w+\.)*[a-z]\w*\Z|timm\.(?:models\.)?create_model\Z")


def check_whole_module(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT038: whole module in torch.load."""
    module = check.module
    for call in module.calls_of("torch.load"):
        if any(argument.arg in ("weights_only", None) for argument in call.keywords):
            continue
        if _used_as_module(module, call) or _saved_whole(check, call):
            yield check.problem("DT038", call, "a whole module is loaded: torch.load refuses it since torch 2.6")
        elif (setting := _saved_settings(check, call)) is not None:
            yield check.problem(
                "DT038", call,
                f"the snapshot holds `{setting}`, an argparse.Namespace: torch.load refuses it since torch 2.6",
                fix="save vars(args), or load with weights_only=False what is trusted",
            )  # fmt: skip


def _loaded_as(module: SourceFile, call: ast.Call) -> tuple[str | None, set[str]]:
    """Return the name of a loaded file's content, and the keys that its function reads from it."""
    assigned = getattr(module.statement(call), "value", None) is call
    name = read_assigned_name(module, call) if assigned else None
    scope = module.scope(call)
    later = [binding.line for binding in module.bindings.get((scope, name or ""), ()) if binding.line > call.lineno]
    keys = {
        str(read_constant_value(use.slice)) for use in module.nodes_of(ast.Subscript)
        if name is not None and format_dotted_name(use.value) == name and module.scope(use) is scope
        and read_constant_value(use.slice) and call.lineno <= use.lineno < min(later, default=use.lineno + 1)
    }  # fmt: skip
    return name, keys


def _saved_whole(check: CheckContext, call: ast.Call) -> bool:
    """Return whether the project saves a model itself, as in `torch.save(model, path)`, that this call loads."""
    name, keys = _loaded_as(check.module, call)
    if name is not None and keys:
        return _saved_module_as(check, keys)
    if name is None or not _MODULE.search(name):
        return False
    return any(
        save.args
        and isinstance(save.args[0], ast.Name | ast.Attribute)
        and _MODULE.search(format_dotted_name(save.args[0]) or "")
        for source in check.project.find_modules_with_words(check.module, "torch.save")
        for save in source.calls_of("torch.save")
    )


def _saved_module_as(check: CheckContext, keys: set[str]) -> bool:
    """Return whether the project saves a module itself, and not its state, under one of these keys."""
    for source in check.project.find_modules_with_words(check.module, "torch.save"):
        for save in source.calls_of("torch.save"):
            for value in find_value_origins(source, save.args[0]) if save.args else ():
                items = list_mapping_items(value.node) or []
                if any(item in keys and isinstance(given, ast.Name) and _MODULE.search(given.id)
                       and not _is_a_state(value.module, given) for item, given in items):  # fmt: skip
                    return True
    return False


def _is_a_state(module: SourceFile, name: ast.Name) -> bool:
    """Return whether a model's name may hold its state, or another value that is not a module."""
    return any("state" in ast.unparse(value.node) for value in find_value_origins(module, name))


def _saved_settings(check: CheckContext, call: ast.Call) -> str | None:
    """Return the command line's settings that the loaded snapshot contains next to states; None without any."""
    _, keys = _loaded_as(check.module, call)
    parsed = check.project.has_text(check.module, "parse_args") or re.search(
        r"\bargs\.[a-z]\w*\s*=[^=]", check.module.text
    )
    if not keys or not parsed:
        return None
    for source in check.project.find_modules_with_words(check.module, "state_dict("):
        for state in source.nodes_of(ast.Dict):
            saved = {
                str(read_constant_value(name)): value for name, value in zip(state.keys, state.values, strict=True)
            }
            setting = next(
                (ast.unparse(value) for value in saved.values() if format_dotted_name(value) in _SETTINGS), None
            )
            states = any("state_dict(" in ast.unparse(value) for value in saved.values())
            if setting is not None and states and (keys & set(saved) - _STATES_OF_MODELS or len(keys & set(saved)) > 1):
                return setting
    return None


def _used_as_module(module: SourceFile, call: ast.Call) -> bool:
    """Return whether the loaded object, or an item of it, is used as a module."""
    above: ast.AST = call
    parent = module.parents.get(above)
    while isinstance(parent, ast.Subscript) and parent.value is above:
        above, parent = parent, module.parents.get(parent)
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("eval", "cuda", "half", "parameters", "train")
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return False
    name = format_dotted_name(parent.targets[0])
    if name is None:
        return False
    scope = module.scope(call)
    for use in module.nodes_of(ast.Attribute):
        if format_dotted_name(use.value) != name or module.scope(use) is not scope or use.lineno < call.lineno:
            continue
        current = module.find_current_binding(use.value, use)
        if use.attr in ("eval", "parameters", "train") and current is not None and current.statement is parent:
            return isinstance(module.parents.get(use), ast.Call)
    return False


def check_map_location(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT052: load without map_location."""
    module = check.module
    if not module.calls_of("torch.load") or not re.search("cuda|gpu", module.text):
        return
    if not check.project.distributed(module) or check.project.framework_has_loop(module):
        return
    for call in module.calls_of("torch.load"):
        given = {argument.arg for argument in call.keywords} & {"map_location", None, "mmap"}
        if len(call.args) != 1 or given or resolve_rank_guard(module, call) is not None:
            continue
        if mentions_rank(module, call.args[0]) or _is_data_load(check, call) or is_single_process_code(module, call):
            continue
        yield check.problem("DT052", call, "torch.load without map_location: every rank loads to the GPU that saved it")


def _is_data_load(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a call loads data rather than the state of a training run, by names and context."""
    module = check.module
    owner = module.find_enclosing_node(call, (ast.ClassDef,))
    if isinstance(owner, ast.ClassDef) and re.search(
        r"Data|Loader|Sampler", owner.name + " ".join(map(ast.unparse, owner.bases))
    ):
        return True
    statement = module.statement(call)
    text = ast.unparse(call.args[0]) + (ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else "")
    name = read_assigned_name(module, call)
    if name and re.search(rf"load_state_dict\([^\n]*\b{name}\b", ast.unparse(module.scope(call))):
        return False
    named = re.search(r"data|feat|embed|token|label|audio|wav|image|latent|vocab|dict\b(?<!state_dict)", text)
    return named is not None and re.search(r"(?:ckpt|checkpoint)_?dict\b", text) is None


def check_downloaded_by_all(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT040: download by every rank."""
    module = check.module
    if (not module.trains and not next(_find_downloads(module), None)) or not check.project.distributed(module):
        return
    if check.project.framework_has_loop(module):
        return
    if module.trains or not check.project.importers(module):
        for call, name, weights in _find_downloads(module):
            if _one_first(module, call) or is_launcher_code(module, call):
                continue
            message = "the pretrained weights are" if weights else f"`{name}` is"
            yield check.problem(
                "DT040",
                call,
                f"{message} downloaded by every rank, into one folder",
                severity="info" if weights else None,
            )
    yield from _from_the_hub(check)
    # A file that does not use ranks: the problem is reported where the training code calls the function.
    for name in sorted(module.methods) if module.trains else ():
        if not re.search(r"data|load|build|get|make|create|prepare|train|test|set", name, re.IGNORECASE):
            continue
        for call in module.methods[name]:
            target = find_called_function(module, call)
            if target is None or target.module is module or target.module.trains:
                continue
            inside = [
                dataset for download, dataset, weights in _find_downloads(target.module)
                if target.module.scope(download) is target.node
                and not weights and not _one_first(target.module, download)
            ]  # fmt: skip
            if inside and not _one_first(module, call) and not is_launcher_code(module, call):
                yield check.problem("DT040", call, f"`{inside[0]}` is downloaded by every rank, into one folder")


def _from_the_hub(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT040 for Hugging Face's hub, at most once per file, since files are locked during a download."""
    module = check.module
    calls = _list_hub_calls(check)
    for method in sorted(module.methods) if module.trains else ():
        if re.search(r"model|token|data|load|build|create", method):
            for call in module.methods[method]:
                target = find_called_function(module, call)
                if target is not None and target.module is not module and not target.module.trains:
                    other = CheckContext(target.module, check.project, check.cluster)
                    inside = [one for one in _list_hub_calls(other) if target.module.scope(one[0]) is target.node]
                    calls += [(call, name) for _, name in inside[:1] if _is_done_by_all(module, call)]
    if calls:
        also = name_other_lines(sorted({call.lineno for call, _ in calls})[1:])
        call, name = min(calls, key=lambda one: one[0].lineno)
        yield check.problem(
            "DT040", call, f"every rank asks the hub for `{name}`{also}", severity="info",
            fix=f"`hf download {name}` once for each node and HF_HUB_OFFLINE=1, or one rank of a node first",
        )  # fmt: skip


def _list_hub_calls(check: CheckContext) -> list[tuple[ast.Call, str]]:
    """Return the calls of a file that ask the hub on every rank, each with the name that it asks for."""
    methods = ("from_pretrained", "load_dataset", "snapshot_download")
    calls = [call for method in methods for call in check.module.methods.get(method, ())]
    named = [(call, name) for call in calls if (name := _hub_name(check, call)) is not None]
    return [(call, name) for call, name in named if _is_done_by_all(check.module, call)]


def _is_done_by_all(module: SourceFile, call: ast.Call) -> bool:
    """Return whether all ranks make a call at the same time."""
    if _one_first(module, call) or is_launcher_code(module, call):
        return False
    return not is_single_process_code(module, call) and not _in_turn(module, call)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_HUB_SETTING = re.compile(r"(?:name_or_path|(?:model|dataset|tokenizer|checkpoint)_(?:name|id))(?:'\])?$")
"""Pattern of names of settings that are names of the hub."""
_BUILDERS = frozenset(("json", "csv", "text", "parquet", "arrow", "imagefolder", "audiofolder", "webdataset", "pandas"))
"""Formats that load_dataset reads from the user's files."""
_FIRST = re.compile(r"(?:process|rank|zero|0|main|master)_first|first_rank|rank_ordered")


def _hub_name(check: CheckContext, call: ast.Call) -> str | None:
    """Return the name that a call requests from the hub; None for a path, an unknown name, and existing files."""
    if not _of_the_hub(check.module, call):
        return None
    given = {argument.arg for argument in call.keywords}
    local = find_keyword_value(call, "local_files_only")
    wanted = (
        call.args[0]
        if call.args
        else find_keyword_value(call, "pretrained_model_name_or_path") or find_keyword_value(call, "repo_id")
    )
    if wanted is None or (local is not None and read_constant_value(local) is not False) or "data_files" in given:
        return None
    for value in find_value_origins(check.module, wanted):
        name = (
            read_constant_value(value.node)
            if isinstance(value.node, ast.Constant)
            else default_of_setting(check, value.node)
        )
        if isinstance(value.node, ast.JoinedStr) and re.match(
            r"[\w-]+/[\w-]", str(read_constant_value(value.node.values[0]))
        ):
            name = str(read_constant_value(value.node.values[0])).rstrip("-_")
        if isinstance(name, str) and _HUB_NAME.fullmatch(name) and name not in _BUILDERS:
            return name
        setting = isinstance(value.node, ast.Name | ast.Attribute | ast.Subscript)
        if name is None and setting and _HUB_SETTING.search(ast.unparse(value.node)):
            return ast.unparse(value.node)
    return None


_HUB_PACKAGES = "transformers diffusers datasets sentence_transformers huggingface_hub open_clip peft".split()


def _of_the_hub(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call belongs to a library that uses the hub: to one of its classes or functions."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    return any(
        (value.module.name(value.node) or "").partition(".")[0] in _HUB_PACKAGES
        for value in find_value_origins(module, owner)
    )


def default_of_setting(check: CheckContext, node: ast.expr) -> object:
    """Return the default of a command line's setting, from argparse or a class of settings."""
    if not isinstance(node, ast.Attribute):
        return None
    module = check.module
    for call in module.methods.get("add_argument", ()):
        names = [str(read_constant_value(one)).lstrip("-").replace("-", "_") for one in call.args]
        if node.attr in names:
            default = find_keyword_value(call, "default")
            backend = re.fullmatch(r"[\w.]*Backend\.([A-Z]+)", format_dotted_name(default) or "") if default else None
            return backend[1].lower() if backend else read_constant_value(default)
    for source in check.project.find_modules_with_words(module, f"{node.attr}:"):
        for member in source.nodes_of(ast.AnnAssign):
            if (
                isinstance(source.parents.get(member), ast.ClassDef)
                and format_dotted_name(member.target) == node.attr
                and member.value
            ):
                return read_constant_value(member.value)
    return None


def _in_turn(module: SourceFile, call: ast.Call, depth: int = 2) -> bool:
    """Return whether a call, or all calls of its function, are in a context that lets one rank go first."""
    if any(_FIRST.search(ast.unparse(context)) for context in list_contexts(module, call)):
        return True
    callers = find_callers(module, module.scope(call))[:8] if depth else []
    return bool(callers) and all(_in_turn(caller, calling, depth - 1) for caller, calling in callers)


def _find_downloads(module: SourceFile) -> Iterator[tuple[ast.Call, str, bool]]:
    """Yield calls that download: (call, called name, True for weights, which torch.hub moves into place atomically)."""
    for name, calls in sorted(module.calls.items()):
        short = name.rpartition(".")[2]
        hub = name in (
            "torch.hub.load", "torch.hub.load_state_dict_from_url", "torch.utils.model_zoo.load_url", "torch.hub.list",
        )  # fmt: skip
        weights = _MODELS.match(name) is not None
        for call in calls:
            download = find_keyword_value(call, "download")
            wanted = download is not None and _is_download_wanted(module, download)
            by_position = _DATASETS.match(name) is not None and _download_by_position(call)
            if (wanted or by_position) and short[:1].isupper():
                yield call, short, False
            elif (hub and read_constant_value(find_keyword_value(call, "pretrained")) is not False) or (
                weights and _has_pretrained_weights(call)
            ):
                yield call, short, True
    for call in module.calls_of("nltk.download"):
        yield call, f"nltk's {ast.unparse(call.args[0])}" if call.args else "nltk", False
    for calls in module.methods.values():
        for call in calls:
            download = find_keyword_value(call, "download")
            if download is not None and _is_download_wanted(module, download) and module.name(call.func) is None:
                short = format_dotted_name(call.func) or "this dataset"
                if short.rpartition(".")[2][:1].isupper() or isinstance(call.func, ast.Subscript):
                    yield call, short, False


def _is_download_wanted(module: SourceFile, download: ast.expr) -> bool:
    """Return whether `download=` is True, or a check for missing data, which all ranks make at the same time."""
    return any(
        read_constant_value(value) is True or (isinstance(value, ast.UnaryOp) and "exists(" in ast.unparse(value))
        for value in module.values(download)
    )


def _has_pretrained_weights(call: ast.Call) -> bool:
    pretrained, weights = find_keyword_value(call, "pretrained"), find_keyword_value(call, "weights")
    if pretrained is None and weights is None and call.args:
        pretrained = call.args[0]
    return read_constant_value(pretrained) is True or (
        weights is not None
        and read_constant_value(weights) != ""
        and not (isinstance(weights, ast.Constant) and weights.value is None)
    )


def _download_by_position(call: ast.Call) -> bool:
    """Return the argument `download` of MNIST(root, train, transform, target_transform, download); None without it."""
    return len(call.args) > 4 and read_constant_value(call.args[4]) is True


def _one_first(module: SourceFile, call: ast.Call) -> bool:
    """Return whether one rank makes a call alone or first: under a condition, or next to a barrier."""
    if resolve_rank_guard(module, call) is not None:
        return True
    function = module.scope(call)
    if _waits_nearby(module, call) or any(_waits_nearby(*caller) for caller in find_callers(module, function)[:8]):
        return True
    # One rank loads the same dataset in an earlier call.
    name = format_dotted_name(call.func)
    return any(
        other is not call
        and format_dotted_name(other.func) == name
        and (is_launcher_code(module, other) or (other.lineno < call.lineno and resolve_rank_guard(module, other)))
        for other in module.methods.get((name or "").rpartition(".")[2], ())
    )


def _waits_nearby(module: SourceFile, call: ast.Call) -> bool:
    function = module.scope(call)
    before = [one for one in module.calls.get("torch.distributed.barrier", ()) if one.lineno < call.lineno]
    return any(module.scope(one) is function and resolve_rank_guard(module, one, 0) is not None for one in before)


CHECKS = (check_whole_module, check_map_location, check_downloaded_by_all)
