"""Rules about the share of the data for each rank: DT037, DT056, DT057, DT058."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.flow import find_called_function, find_value_origins, names_given
from dtctl.lint.model import Problem, Severity
from dtctl.lint.ranks import is_world_size, rank_kind, resolve_rank_guard
from dtctl.lint.source_file import (
    SourceFile,
    find_argument,
    find_keyword_value,
    format_dotted_name,
    read_assigned_name,
    read_constant_value,
    read_last_name,
)

_HELD_OUT = re.compile(
    r"(?:^|_|\b)(?:val|valid|validate|validation|test|eval|evaluation|dev)(?=$|_|\b|set|data|sampler|loader|ds)"
    r"|(?-i:(?<=[a-z])(?:Val|Valid|Validation|Test|Eval)(?=$|_|[A-Z]))",
    re.IGNORECASE,
)
_RANDOM_ORDER = frozenset(["random.shuffle", "numpy.random.shuffle", "numpy.random.permutation", "random.sample"])
_SEEDS = ("manual_seed", "seed", "seed_everything", "set_seed", "fix_seed", "setup_seed", "seed_all", "set_random_seed",
          "init_seeds", "fix_random_seed", "set_seeds", "seed_torch", "init_seed", "same_seeds")  # fmt: skip


def check_local_rank_as_rank(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT037: local rank as rank."""
    module = check.module
    if check.cluster.single_node or not module.trains:
        return
    for call in _list_divisions_by_rank(module):
        positional = read_last_name(call.func) == "DistributedSampler"
        rank = find_argument(call, "rank", 2) if positional else find_keyword_value(call, "rank")
        if rank is not None and rank_kind(module, rank) == "local":
            yield _build_local_rank_problem(check, call, rank)
        else:
            yield from _check_number_of_ranks(check, call)
    for node in module.nodes_of(ast.Subscript):
        part = node.slice
        if not isinstance(part, ast.Slice) or part.lower is None or part.step is None:
            continue
        if rank_kind(module, part.lower) == "local" and is_world_size(module, part.step):
            yield check.problem(
                "DT037", node, "data is divided by the local rank: ranks of several nodes get the same share",
                severity=_severity_on_nodes(check, unsure=False),
            )  # fmt: skip


def _severity_on_nodes(check: CheckContext, *, unsure: bool) -> Severity | None:
    """Return the severity of a mistake that matters on several nodes; None for the rule's own."""
    if check.cluster.multi_node:
        return "error"
    return "info" if unsure else None


def _list_divisions_by_rank(module: SourceFile) -> list[ast.Call]:
    """Return calls that get a rank and the number of ranks: of the process group, samplers, datasets and loaders."""
    names_of_others = [name for name in module.methods if re.search(r"Sampler\Z|Dataset\Z|Loader\Z|\Ashard\Z", name)]
    others = [
        call
        for name in names_of_others
        for call in module.methods[name]
        if find_keyword_value(call, "num_replicas") or find_keyword_value(call, "world_size")
    ]
    return list(dict.fromkeys([*module.calls_of(names.INIT, names.SAMPLER), *others]))


def _build_local_rank_problem(check: CheckContext, call: ast.Call, rank: ast.expr) -> Problem:
    """Return the problem of a call that gets the local rank."""
    values = find_value_origins(check.module, rank)
    parameter = all(isinstance(value.node, ast.Name) for value in values)
    lines = [value.node.lineno for value in values if value.module is check.module]
    where = next((line for line in lines if line != rank.lineno and not parameter), None)
    at = f" (from line {where})" if where else ""
    name = read_last_name(call.func)
    return check.problem(
        "DT037",
        rank,
        f"{name} gets the local rank `{ast.unparse(rank)}`{at}: on every node it begins at 0 again",
        severity=_severity_on_nodes(check, unsure=parameter or _is_spawning_ranks(check) or _one_node(call)),
    )


def _check_number_of_ranks(check: CheckContext, call: ast.Call) -> Iterator[Problem]:
    """Yield the arguments of a call that are the number of this node's GPUs."""
    for name in ("world_size", "num_replicas"):
        size = find_keyword_value(call, name)
        if size is not None and _counts_gpus(check, size):
            yield check.problem(
                "DT037",
                size,
                f"{read_last_name(call.func)} gets the number of this node's GPUs as the number of ranks",
                severity=_severity_on_nodes(check, unsure=_is_spawning_ranks(check)),
            )


def _one_node(call: ast.Call) -> bool:
    """Return whether the rendezvous of the ranks is on their own node."""
    method = read_constant_value(find_keyword_value(call, "init_method"))
    return isinstance(method, str) and ("127.0.0.1" in method or "localhost" in method)


def _counts_gpus(check: CheckContext, node: ast.expr) -> bool:
    """Return whether a value is torch.cuda.device_count(), for any of its origins."""
    values = find_value_origins(check.module, node)
    return bool(values) and all(
        isinstance(value.node, ast.Call) and value.module.name(value.node.func) == "torch.cuda.device_count"
        for value in values
    )


def _is_spawning_ranks(check: CheckContext) -> bool:
    """Return whether the program starts its ranks itself, on its node."""
    return check.project.has_text(check.module, "notebook_launcher") or any(
        check.project.calls(check.module, starter) for starter in names.STARTS
    )


def check_padded_evaluation(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT056: evaluation with repeated samples."""
    module = check.module
    if check.project.uses_framework(module):
        return
    for call in module.calls_of(names.SAMPLER):
        dropped = find_keyword_value(call, "drop_last")
        if read_constant_value(dropped) is True or not _held_out(check, call):
            continue
        yield check.problem("DT056", call, "DistributedSampler repeats samples until all ranks have the same number")
    for name in [name for name in module.methods if "sampler" in name.lower()]:
        for call in module.methods[name]:
            if find_called_function(module, call) is not None and _is_sampler(module, call) and _held_out(check, call):
                yield check.problem(
                    "DT056", call, f"the sampler of `{name}` repeats samples until all ranks have the same number"
                )


def check_gathered_twice(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT056 for accelerate: `gather` in an evaluation, since only `gather_for_metrics` drops repetitions."""
    module = check.module
    if "accelerat" not in module.text or check.project.framework_has_loop(module):
        return
    for call in module.methods.get("gather", ()):
        function = module.scope(call)
        owner = format_dotted_name(call.func.value) if isinstance(call.func, ast.Attribute) else None
        loop = module.find_enclosing_node(call, (ast.For,))
        if owner is None or "accelerator" not in owner or loop is None or not isinstance(function, ast.FunctionDef):
            continue
        evaluates = re.search(r"val|test|eval", function.name) and not module.find_calls_below(function, "backward")
        given = " ".join(ast.unparse(one) for one in call.args)
        figures = re.search(r"pred|label|output|logits|loss|acc|correct|top\d", given)
        if evaluates and figures and not module.methods.get("gather_for_metrics"):
            yield check.problem(
                "DT056", call, "gather() also brings the samples that were repeated to make the shares equal",
                fix="gather_for_metrics() leaves them out",
            )  # fmt: skip
            return


def _is_sampler(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call returns a DistributedSampler that keeps the rest of the division."""
    return any(
        isinstance(value.node, ast.Call)
        and value.module.name(value.node.func) == names.SAMPLER
        and read_constant_value(find_keyword_value(value.node, "drop_last")) is not True
        for value in find_value_origins(module, call)
    )


def _held_out(check: CheckContext, call: ast.Call) -> bool:
    """Return whether a sampler or loader has data for evaluation, by its names."""
    data = call.args[0] if call.args else find_keyword_value(call, "dataset")
    above = check.module.parents.get(call)
    # The name of the argument counts in DataLoader(valid=sampler), but not in DataLoader(sampler=sampler).
    passed_as = above.arg if isinstance(above, ast.keyword) and above.arg != "sampler" else None
    texts = (read_assigned_name(check.module, call), format_dotted_name(data) if data is not None else None, passed_as)
    return any(_HELD_OUT.search(text or "") is not None for text in texts)


def check_evaluated_by_all(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT057: evaluation by every rank."""
    module = check.module
    if not (module.calls_of(names.SAMPLER) or check.project.distributed(module)):
        return
    if check.project.uses_framework(module) and (
        check.project.framework_has_loop(module) or "deepspeed." not in module.text
    ):
        return  # DeepSpeed divides only the training data
    for call in module.calls_of(names.LOADER):
        given = names_given(module, call)
        if None in given or given & {"sampler", "batch_sampler"} or len(call.args) > 3 or not _held_out(check, call):
            continue
        if resolve_rank_guard(module, call) is not None or _used_by_some(check, call):
            continue
        yield check.problem("DT057", call, "every rank evaluates the whole set")


def _used_by_some(check: CheckContext, loader: ast.Call) -> bool:
    """Return whether a loader is only used under a condition on the rank."""
    module = check.module
    name = read_assigned_name(module, loader)
    if name is None:
        return True
    for use in [call for calls in module.methods.values() for call in calls]:
        given = {format_dotted_name(argument) for argument in (*use.args, *(one.value for one in use.keywords))}
        if name in given and format_dotted_name(use.func) != "len" and resolve_rank_guard(module, use) is not None:
            return True
    return False


def check_own_random_order(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT058: split of each rank's own."""
    module = check.module
    yield from _shuffled_by_datasets(check)
    splits = module.calls_of("torch.utils.data.random_split")
    orders = [call for name in sorted(_RANDOM_ORDER) for call in module.calls_of(name) if _orders_files(check, call)]
    draws = [call for call in module.methods.get("sample", ()) if _draws_rows(module, call)]
    some = splits or orders or draws or module.methods.get("train_test_split")
    if not some or not (check.project.distributed(module) or check.project.uses_framework(module)):
        return
    if check.project.framework_has_loop(module):
        return
    if any(check.project.methods(module, name) for name in _SEEDS):
        return
    for call in splits:
        if find_argument(call, "generator", 2) is None and resolve_rank_guard(module, call) is None:
            yield check.problem("DT058", call, "random_split without a seed: every rank splits the set differently")
    yield from _split_by_sklearn(check)
    for call in draws:
        yield check.problem("DT058", call, "sample() without random_state: every rank draws other rows")
    for call in orders:
        yield check.problem(
            "DT058", call, f"`{ast.unparse(call.args[0])}` has another order on every rank: their shares overlap"
        )


def _draws_rows(module: SourceFile, call: ast.Call) -> bool:
    """Return whether a call draws rows, without a seed, from a pandas table that was read from a file."""
    if not isinstance(call.func, ast.Attribute) or find_keyword_value(call, "random_state") is not None:
        return False
    whole = (
        read_constant_value(find_keyword_value(call, "frac")) == 1
        and module.find_enclosing_node(call, (ast.FunctionDef,)) is not None
    )
    bound = [binding.value for binding in module.lookup(call.func.value) if binding.value is not None]
    read = any(
        isinstance(value, ast.Call) and (module.name(value.func) or "").startswith("pandas.read_") for value in bound
    )
    return read and not whole and resolve_rank_guard(module, call) is None


def _orders_files(check: CheckContext, call: ast.Call) -> bool:
    """Return whether all ranks shuffle files or samples, once for the whole run."""
    module = check.module
    if not call.args or not module.trains or resolve_rank_guard(module, call) is not None:
        return False
    if module.find_enclosing_node(call, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) is not None and re.match(
        r"__getitem__|__iter__|forward|collate", getattr(module.scope(call), "name", "")
    ):
        return False
    return re.search(r"file|path|sample|indices|idx|shard|data|url|image", ast.unparse(call.args[0])) is not None


def _shuffled_by_datasets(check: CheckContext) -> Iterator[Problem]:
    """Yield calls of `dataset.shuffle()` of Hugging Face's datasets, which draws a different seed in every process."""
    module = check.module
    if "load_dataset" not in module.text or not re.search("LOCAL_RANK|WORLD_SIZE|init_process_group", module.text):
        return
    for call in module.methods.get("shuffle", ()):
        if call.args or call.keywords or not isinstance(call.func, ast.Attribute):
            continue
        if resolve_rank_guard(module, call) is not None:
            continue
        if _comes_from_hub(module, call.func.value):
            yield check.problem(
                "DT058",
                call,
                "shuffle() without a seed: every rank has its samples in another order, and shares overlap",
            )


def _comes_from_hub(module: SourceFile, node: ast.AST, depth: int = 3) -> bool:
    """Return whether an expression, or the origin of its name, calls load_dataset."""
    while isinstance(node, ast.Subscript | ast.Call | ast.Attribute):
        if isinstance(node, ast.Call) and read_last_name(node.func) == "load_dataset":
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    origins = find_value_origins(module, node) if isinstance(node, ast.Name) and depth else []
    return any(_comes_from_hub(value.module, value.node, depth - 1) for value in origins if value.node is not node)


def _split_by_sklearn(check: CheckContext) -> Iterator[Problem]:
    """Yield calls of scikit-learn's train_test_split, which uses numpy's random numbers."""
    module = check.module
    for call in module.methods.get("train_test_split", ()):
        given = {argument.arg for argument in call.keywords}
        shuffled = read_constant_value(find_keyword_value(call, "shuffle")) is not False
        if shuffled and not given & {"random_state", None} and resolve_rank_guard(module, call) is None:
            yield check.problem("DT058", call, "train_test_split without a seed: every rank splits the set differently")


CHECKS = (
    check_local_rank_as_rank,
    check_padded_evaluation,
    check_gathered_twice,
    check_evaluated_by_all,
    check_own_random_order,
)
