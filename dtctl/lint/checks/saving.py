"""Rules about files that ranks write: DT014, DT015, DT069."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint.check import CheckContext
from dtctl.lint.flow import (
    find_call_argument,
    find_called_function,
    find_value_origins,
    is_bound_method,
    list_mapping_items,
)
from dtctl.lint.model import Problem
from dtctl.lint.ranks import (
    RankGuard,
    is_launcher_code,
    is_single_process_code,
    list_rank_guards,
    mentions_rank,
    resolve_rank_guard,
)
from dtctl.lint.source_file import (
    Function,
    SourceFile,
    find_argument,
    find_keyword_value,
    format_dotted_name,
    read_assigned_name,
    read_constant_value,
    read_last_name,
)

_NODE_LOCAL = re.compile(r"/tmp|/dev/shm|scratch|local|tempfile")  # noqa: S108 - looked for, not used
_OWN_PATH = re.compile(
    r"tempfile(?!\.gettempdir)|mk[ds]temp|Temporary(?:File|Directory)|tmp_?(?:path|dir)|uuid|getpid|hostname|/proc/"
)
_WRITERS = {
    "torch.save": 1, "numpy.save": 0, "numpy.savez": 0, "numpy.savez_compressed": 0, "numpy.savetxt": 0,
    "pickle.dump": 1, "json.dump": 1, "yaml.dump": 1, "yaml.safe_dump": 1, "joblib.dump": 1,
    "safetensors.torch.save_file": 1, "torchvision.utils.save_image": 1, "torchaudio.save": 0, "soundfile.write": 0,
    "shutil.copytree": 1, "logging.FileHandler": 0, "logging.basicConfig": 9, "cv2.imwrite": 0,
    "imageio.imwrite": 0, "matplotlib.pyplot.savefig": 0, "scipy.io.savemat": 0,
    "scipy.io.wavfile.write": 0, "shutil.copy": 1, "shutil.copyfile": 1, "shutil.copy2": 1,
}  # fmt: skip
"""Calls that write a file -> index of the argument with its path."""
_PATHS = ("f", "path", "file", "filename", "fp", "fname")
_METHODS = "to_csv to_json to_parquet to_pickle savefig save_pretrained write_text write_bytes tofile".split()
_HELPER = re.compile(r"save|write|dump|store|export|checkpoint|ckpt|snapshot|log_to|logger|record", re.IGNORECASE)
_SAVES = re.compile(r"(?:^|_)save_?(?:checkpoint|model|state|ckpt|snapshot|weights)")
_RESUMES = re.compile(r"resume|start_epoch|epochs_run|continue_from|epoch_st\b|begin_epoch")
"""Pattern of words in a program that continues an earlier run."""
_SCALES = re.compile(r"\bGradScaler\(|\bamp\.initialize\(")


def check_every_rank_writes(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT014: every rank writes one file."""
    module = check.module
    writes = list(_find_file_writes(module))
    saves = [name for name in sorted(module.methods) if _SAVES.search(name)]
    if (not writes and not saves) or check.project.framework_has_loop(module) or not check.project.distributed(module):
        return
    # Such a write is reported where the training code calls the function.
    elsewhere = not module.trains and bool(check.project.importers(module))
    for call, path in writes if not elsewhere else ():
        if _is_write_of_all_ranks(check, call, path):
            callers = _describe_callers(module, call)
            yield check.problem("DT014", call, f"every rank writes `{ast.unparse(path)}`{callers}")
    yield from _through_helpers(check)
    for name in saves:
        if not (name in module.functions and _guarded_inside(check, name)):
            yield from _in_handlers(check, name)


def check_opened_logs(check: CheckContext) -> Iterator[Problem]:
    """Check rules DT014 and DT015 for logs of events: every rank, or one of each node, opens one."""
    module = check.module
    distributed = module.trains and not check.project.framework_has_loop(module) and check.project.distributed(module)
    for call in [*module.methods.get("SummaryWriter", ()), *module.calls_of("wandb.init")]:
        condition, name = resolve_rank_guard(module, call), format_dotted_name(call.func)
        own = is_launcher_code(module, call) or re.search("rank|group", ast.unparse(call).lower())
        if condition is None and distributed and not own:
            yield check.problem("DT014", call, f"every rank opens a log: `{name}`", severity="info")
        if condition is None or check.cluster.single_node or not _is_of_local_rank(condition):
            continue
        if "LOCAL_RANK" in module.text or "local_rank" in ast.unparse(condition.test).lower():
            yield check.problem("DT015", call, f"one rank of every node opens a log: `{name}`", severity="info")


def _is_of_local_rank(condition: RankGuard | None) -> bool:
    """Return whether a condition around a call selects local rank 0."""
    return condition is not None and condition.rank == "local" and condition.at_zero and not condition.early


def _is_write_of_all_ranks(check: CheckContext, call: ast.Call, path: ast.expr) -> bool:
    """Return whether all ranks of a training run write to one path."""
    module = check.module
    if resolve_rank_guard(module, call) is not None or is_launcher_code(module, call) or not _fixed_path(check, path):
        return False
    if find_keyword_value(call, "is_main_process") is not None:
        return False  # with `is_main_process`, save_pretrained() writes on one rank
    return _in_training(check, call) and not is_single_process_code(module, call)


def _in_handlers(check: CheckContext, name: str) -> Iterator[Problem]:
    """Yield calls of a function that saves, in exception handlers, which run on the ranks that fail."""
    module = check.module
    known = bool(module.aliases) or name not in module.functions
    for call in module.methods[name] if known else ():
        handler = module.find_enclosing_node(call, (ast.ExceptHandler,))
        if handler is None or resolve_rank_guard(module, call) is not None or format_dotted_name(call.func) != name:
            continue
        if not any(mentions_rank(module, argument) for argument in call.args):
            yield check.problem(
                "DT014", call, f"`{name}` in an exception handler: every rank that fails writes one path"
            )


def _describe_callers(module: SourceFile, call: ast.Call) -> str:
    """Return the callers of the function that writes, as text."""
    function = module.scope(call)
    calls = [
        one.lineno for one in module.methods.get(getattr(function, "name", ""), ()) if module.scope(one) is not function
    ]
    return f" (called from {', '.join(f'line {number}' for number in calls[:3])})" if calls else ""


def _in_training(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a write belongs to a training run: in a file that uses ranks, or as the save of a model."""
    return check.module.trains or (check.module.name(call.func) or "") == "torch.save"


def _find_file_writes(module: SourceFile) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield calls that write a file, each with the path."""
    for name, at in _WRITERS.items():
        for call in module.calls.get(name, ()):
            path = call.args[at] if len(call.args) > at else next(
                (one.value for one in call.keywords if one.arg in _PATHS), None
            )  # fmt: skip
            if path is not None and not _is_open_file(module, path):
                yield call, path
    for call in module.methods.get("open", ()):
        mode = str(read_constant_value(find_argument(call, "mode", 1)) or "")
        if format_dotted_name(call.func) in ("open", "io.open") and call.args and mode.startswith(("w", "x", "a")):
            yield call, call.args[0]
    for name in _METHODS:
        for call in module.methods.get(name, ()):
            if not isinstance(call.func, ast.Attribute) or (module.name(call.func) or "") in _WRITERS:
                continue
            if name in ("write_text", "write_bytes"):
                yield call, call.func.value
            elif call.args:
                yield call, call.args[0]


def _is_open_file(module: SourceFile, node: ast.expr) -> bool:
    """Return whether the target of a write is a file that was opened; then opening it counts as the write."""
    bound = [binding.value for binding in module.lookup(node)]
    return any(isinstance(value, ast.Call) and read_last_name(value.func) == "open" for value in (node, *bound))


def _through_helpers(check: CheckContext) -> Iterator[Problem]:
    """Yield calls of project functions that write to their parameter, or to a fixed path, on every rank."""
    module = check.module
    helpers = [helper for helper in sorted(module.methods) if _HELPER.search(helper)]
    for name, call in [(helper, one) for helper in helpers for one in module.methods[helper]]:
        target = find_called_function(module, call)
        if target is None or not isinstance(target.node, Function) or resolve_rank_guard(module, call) is not None:
            continue
        if target.module is module or target.module.trains:
            continue
        if is_launcher_code(module, call) or is_single_process_code(module, call):
            continue
        path = _written_by(target.module, target.node, call)
        if path is None or _OWN_PATH.search(ast.unparse(path)):
            continue
        if any(mentions_rank(module, given) for given in (*call.args, *(one.value for one in call.keywords))):
            continue
        yield check.problem("DT014", call, f"every rank writes `{ast.unparse(path)}` through `{name}`")


def _written_by(module: SourceFile, function: Function, call: ast.Call) -> ast.expr | None:
    """Return the path that a function of another file writes on every rank; None if there is none."""
    for write, path in _find_file_writes(module):
        if module.scope(write) is not function or next(list_rank_guards(module, write), None) is not None:
            continue
        if mentions_rank(module, path):
            return None
        root = next((part for part in ast.walk(path) if isinstance(part, ast.Name)), None)
        if root is None:
            return path
        return find_call_argument(call, function, root.id, bound=is_bound_method(module, function)) or path
    return None


def _guarded_inside(check: CheckContext, name: str) -> bool:
    """Return whether a function of this file tests the rank itself before it saves."""
    module = check.module
    saves = [
        call
        for function in module.functions[name]
        for call in module.calls_of("torch.save")
        if module.scope(call) is function
    ]
    if any(next(list_rank_guards(module, call), None) is not None for call in saves):
        # A method of the same name is not the function that is called by its bare name.
        return any(isinstance(module.parents[definition], ast.Module) for definition in module.functions[name])
    return False


def _fixed_path(check: CheckContext, path: ast.expr) -> bool:
    """Return whether all ranks have the same path, and the value is known to be a path."""
    module = check.module
    if mentions_rank(module, path):
        return False
    function = module.scope(path)
    parameters: set[str] = set()
    if isinstance(function, Function):
        parameters = {parameter.arg for parameter in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    for value in module.values(path):
        if _OWN_PATH.search(ast.unparse(value)):
            return False
        if isinstance(value, ast.Call) and read_last_name(value.func) in ("BytesIO", "StringIO"):
            return False
        for part in ast.walk(value):
            if isinstance(part, ast.Name) and part.id in parameters and not _same_for_all(module, part):
                return False  # the caller chooses the path
    return True


def _same_for_all(module: SourceFile, parameter: ast.Name) -> bool:
    """Return whether a parameter holds the settings, or a path that all callers write out."""
    if re.fullmatch(
        r"args|cfg|config|config_path|cfg_path|opts?|hparams|(?:\w+_)?params|hps|conf|flags|settings|epoch|step|i|iteration|it|iter|iters|n_iter|global_step",
        parameter.id,
    ):
        return True
    function = module.scope(parameter)
    if isinstance(function, Function) and function.name in module.started:
        return function.args.args[0].arg != parameter.id  # all processes get the same arguments
    values = find_value_origins(module, parameter)
    return all(
        (
            isinstance(value.node, ast.Constant | ast.JoinedStr)
            or (format_dotted_name(value.node) or "").split(".")[0] in ("args", "cfg", "opt")
        )
        and "rank" not in ast.unparse(value.node)
        for value in values
    )


def check_local_rank_writes(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT015: one writer for each node."""
    module = check.module
    if check.cluster.single_node:
        return
    for call, path in _find_file_writes(module):
        condition = resolve_rank_guard(module, call)
        if condition is None or not _is_of_local_rank(condition):
            continue
        if not _in_training(check, call) or mentions_rank(module, path):
            continue
        text = " ".join(ast.unparse(value) for value in module.values(path))
        asked = next((value.node for value in find_value_origins(module, condition.test)
                      if isinstance(value.node, ast.Compare) and value.module is module),
                     condition.test) if isinstance(condition.test, ast.expr) else condition.test  # fmt: skip
        guessed = re.search(r"\bgpu|\.gpu", ast.unparse(condition.test)) and "LOCAL_RANK" not in module.text
        if not guessed and not _NODE_LOCAL.search(text):
            at = f" (asked in line {line})" if (line := getattr(asked, "lineno", 0)) else ""
            yield check.problem("DT015", call, f"one rank of every node{at} writes, and all of them the same file")


def check_snapshot_content(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT069: snapshot that lacks a state."""
    module = check.module
    if (
        not check.project.is_distributed_training(module)
        or check.project.framework_has_loop(module)
        or not module.methods.get("backward")
    ):
        return
    helpers = [call for name in module.methods if _SAVES.search(name) for call in module.methods[name]]
    for call in [*module.calls_of("torch.save"), *helpers]:
        states = [value.node for value in find_value_origins(module, call.args[0])] if call.args else []
        for state in states:
            missing = _find_missing_state(module, state) or (
                "optimizer's state" if _weights_only(state) and _goes_on(check) else None
            )
            if missing is not None:
                made = state.lineno if module.is_node_within(state, module.tree) else 0
                at = f" (line {made})" if made not in (0, call.lineno) else ""
                yield check.problem(
                    "DT069",
                    call,
                    f"the {missing} is not in the snapshot{at}, so a resumed training gives other results",
                )
                break


def _find_missing_state(module: SourceFile, state: ast.expr) -> str | None:
    """Return the missing state in a dictionary with a run's epoch; None for other or complete dictionaries."""
    items = list_mapping_items(state)
    if items is None:
        return None
    pairs = [(str(name or ""), ast.unparse(value)) for name, value in [*items, *_list_items_set(module, state)]]
    names = " ".join(name for name, _ in pairs).lower()
    text = " ".join(value for _, value in pairs)
    if not re.search(r"epoch|step|iter", names) or "state_dict(" not in text or any(not name for name, _ in pairs):
        return None
    if not re.search(r"opt", names + text.lower()):
        return "optimizer's state"
    if _SCALES.search(module.text) and not re.search(r"scaler|amp", names + text.lower()):
        return "gradient scaler's state"
    return None


def _list_items_set(module: SourceFile, state: ast.expr) -> list[tuple[object, ast.expr]]:
    """Return the items that the function of a dictionary adds to it: `state["epoch"] = epoch`."""
    name = read_assigned_name(module, state) if state in module.parents else None
    sets = [(one.targets[0], one.value) for one in module.nodes_of(ast.Assign) if name is not None]
    return [
        (read_constant_value(target.slice), value) for target, value in sets
        if isinstance(target, ast.Subscript) and format_dotted_name(target.value) == name
        and module.scope(target) is module.scope(state)
    ]  # fmt: skip


def _weights_only(state: ast.expr) -> bool:
    """Return whether the saved value is the state of a model, or a dictionary with nothing else."""
    values = state.values if isinstance(state, ast.Dict) else [state]
    texts = [ast.unparse(value) for value in values]
    states = [text for text in texts if text.endswith(".state_dict()")]
    return bool(states) and len(states) == len(texts) and all(re.search("model|net", text) for text in states)


def _goes_on(check: CheckContext) -> bool:
    """Return whether a program resumes from its own checkpoint, but never saves the state of an optimizer."""
    module = check.module
    if not module.calls_of("torch.load") or not _RESUMES.search(module.text):
        return False
    return not check.project.has_text(module, re.compile(r"opt\w*(?:\.\w+)?\.state_dict\("))


CHECKS = (check_every_rank_writes, check_opened_logs, check_local_rank_writes, check_snapshot_content)
