"""Rules about the environment of the job: DT029, DT030, DT035, DT042, DT067, DT068."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import CheckContext
from dtctl.lint.checks.loading import default_of_setting
from dtctl.lint.flow import find_called_function, find_parameter_default, find_value_origins
from dtctl.lint.model import Problem, Severity
from dtctl.lint.ranks import one_process
from dtctl.lint.source_file import SourceFile, find_keyword_value, format_dotted_name, read_constant_value
from dtctl.lint.variables import MAX_PORT, NAME, check_variable_setting

_SPAWNS = (
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.Process",
    "multiprocessing.Process",
)
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def _find_variable_settings(check: CheckContext) -> Iterator[tuple[ast.AST, str, ast.expr | None]]:
    """Yield variables that the file sets, also if the launcher has set them: (node, name, value)."""
    module = check.module
    for node in module.nodes_of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_os_environ(check, target.value):
                name = read_constant_value(target.slice)
                if isinstance(name, str):
                    yield node, name, node.value
    for call in module.methods.get("update", ()):
        if isinstance(call.func, ast.Attribute) and _is_os_environ(check, call.func.value):
            yield from ((value, name, value) for name, value in _list_updated_items(call))
    for call in module.calls_of("os.putenv"):
        if len(call.args) == 2 and isinstance(name := read_constant_value(call.args[0]), str):
            yield call, name, call.args[1]


def _list_updated_items(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keys and values of `mapping.update({key: value}, key=value)`."""
    for mapping in call.args:
        if isinstance(mapping, ast.Dict):
            for variable, value in zip(mapping.keys, mapping.values, strict=True):
                if isinstance(name := read_constant_value(variable), str):
                    yield name, value
    for argument in call.keywords:
        if argument.arg is not None:
            yield argument.arg, argument.value


def _is_os_environ(check: CheckContext, node: ast.expr) -> bool:
    return check.module.name(node) == "os.environ" or format_dotted_name(node) in ("os.environ", "environ")


def check_nccl_variables(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT029: variable that is dead, dangerous or too late."""
    module = check.module
    if not any(prefix in module.text for prefix in ("NCCL_", "RCCL_", "GLOO_")):
        return
    starts = [*module.calls_of(names.INIT)]
    for function in [function_def for group in module.functions.values() for function_def in group]:
        if any(module.scope(call) is function for call in module.calls_of(names.INIT)):
            starts += module.methods.get(function.name, [])
    for node, name, value in _find_variable_settings(check):
        if not NAME.match(name):
            continue
        line, scope = node.lineno, module.scope(node)  # type: ignore[attr-defined]
        if any(call.lineno < line and module.scope(call) is scope and module.dominates(call, node) for call in starts):
            yield check.problem("DT029", node, f"{name} is set after init_process_group, which has read it already")
            continue
        literal = read_constant_value(value)
        group = check_variable_setting(name, str(literal) if literal is not None else None)
        if group is not None:
            severity, message, fix = group
            yield check.problem("DT029", node, message, severity=severity, fix=fix)


def check_never_destroyed(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT030: process group not destroyed."""
    module = check.module
    if not check.project.has_text(
        module, re.compile("init_process_group|deepspeed.init_distributed|deepspeed.initialize")
    ):
        return
    if check.project.framework_has_loop(module) or _is_group_destroyed(check, module) or one_process(check.module):
        return
    importers = check.project.importers(module)
    if any(_is_group_destroyed(check, source) for source in importers):
        return
    starting = module.calls_of(names.INIT, "deepspeed.init_distributed") or module.calls_of("deepspeed.initialize")
    for call in starting[:1]:
        starts = module.started.get(getattr(module.scope(call), "name", ""), [])
        users = starts or [
            one for one in module.methods.get(getattr(module.scope(call), "name", ""), ())
            if module.scope(one) is not module.scope(call)
        ]  # fmt: skip
        at = f" (started from line {users[0].lineno})" if users else ""
        yield check.problem("DT030", call, f"the process group{at} is never destroyed")
        return
    # A function of another file starts the group: the problem is reported where the main program calls that function.
    for call in _find_group_starts(module):
        yield check.problem(
            "DT030", call, f"`{format_dotted_name(call.func)}` starts the process group, which is never destroyed"
        )
        return


def _is_group_destroyed(check: CheckContext, module: SourceFile) -> bool:
    """Return whether a module or one of its imports destroys the group of all ranks."""
    return any(
        not call.args and not call.keywords
        for source in check.project.find_modules_with_words(module, "destroy_process_group")
        for call in source.methods.get("destroy_process_group", ())
    )


def _find_group_starts(module: SourceFile) -> Iterator[ast.Call]:
    """Yield calls of functions of other files that start the process group."""
    for name in sorted(module.methods):
        if re.search(r"init|setup|dist|launch|ddp|prepare|slurm", name, re.IGNORECASE):
            for call in module.methods[name]:
                target = find_called_function(module, call)
                if target is not None and target.module is not module and _starts_group(target.module, target.node):
                    yield call


def _starts_group(module: SourceFile, function: ast.AST, depth: int = 2) -> bool:
    """Return whether a function starts the process group, directly or in another function of its file."""
    if any(module.scope(start) is function for start in module.calls_of(names.INIT)):
        return True
    others = [
        other for name, group in module.functions.items() for other in group
        if depth and any(module.scope(call) is function for call in module.methods.get(name, ()))
    ]  # fmt: skip
    return any(_starts_group(module, other, depth - 1) for other in others if other is not function)


def check_fixed_meeting_point(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT035: fixed meeting point."""
    module = check.module
    if one_process(check.module):
        return
    single_node = check.cluster.single_node or any(
        check.project.calls(module, starter) for starter in _SPAWNS
    )  # the program starts its ranks on its own node
    severity: Severity = "error" if check.cluster.multi_node else "info" if single_node else "warning"
    for node, name, value in _find_variable_settings(check):
        if (
            name not in _RENDEZVOUS
            or value is None
            or not isinstance(number := _resolve_fixed_literal(module, value), str | int)
            or _is_optional_setting(check, node)
        ):
            continue
        message = f"{name} is fixed to {number!r}, regardless of the launcher"
        yield check.problem("DT035", node, message, severity=severity)
    yield from _check_fixed_addresses(check)
    for call in module.calls_of(*names.SPAWNS):
        count = find_keyword_value(call, "nprocs")
        for started in find_value_origins(module, count) if count is not None else ():
            number = read_constant_value(started.node)
            if type(number) is int and number > 1 and started.module is module:
                message = f"the number of processes is fixed to {number}"
                yield check.problem("DT035", started.node, message, severity="info")
    for call in module.calls_of(names.INIT):
        if _is_optional_setting(check, call):
            continue
        size, method = find_keyword_value(call, "world_size"), find_keyword_value(call, "init_method")
        number, text = read_constant_value(size), read_constant_value(method)
        if isinstance(number, int) and number > 1 and size is not None:
            yield check.problem("DT035", size, f"world_size is fixed to {number}", severity=severity)
        elif isinstance(text, str) and text.startswith("tcp://") and method is not None:
            yield check.problem("DT035", method, f"the address is fixed to {text}", severity=severity)


def _resolve_fixed_literal(module: SourceFile, value: ast.expr) -> object:
    """Return the literal of a value, including the default of a parameter in `str(port)`; None if there is none."""
    if isinstance(value, ast.Call) and format_dotted_name(value.func) in ("str", "int") and len(value.args) == 1:
        value = value.args[0]
        function = module.scope(value)
        if isinstance(value, ast.Name) and value.id.endswith("port"):
            return read_constant_value(find_parameter_default(function, value.id))
    return read_constant_value(value)


def _check_fixed_addresses(check: CheckContext) -> Iterator[Problem]:
    """Yield addresses with a port that are set for init_method elsewhere in a file: a default, or an attribute."""
    module = check.module
    if not module.trains:
        return
    given: list[tuple[ast.AST, ast.expr]] = [(node, node.value) for node in module.nodes_of(ast.Assign)]
    given += [(default, default) for call in module.methods.get("add_argument", ())
              if (default := find_keyword_value(call, "default")) is not None]  # fmt: skip
    for node, value in given:
        text = ast.unparse(value) if isinstance(value, ast.JoinedStr | ast.Constant) else ""
        if re.search(r"[\"']tcp://[^\"']*:\d+[\"']$", text):
            yield check.problem("DT035", node, f"the address is fixed to {text.strip('f')}", severity="info")


def check_port_beyond_the_last(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT042: port that does not exist."""
    module = check.module
    ports = [
        (node, value)
        for node, name, value in _find_variable_settings(check)
        if name == "MASTER_PORT" and value is not None
    ]
    ports += [
        (call, call.args[1])
        for call in module.methods.get("setdefault", ())
        if len(call.args) == 2 and read_constant_value(call.args[0]) == "MASTER_PORT"
    ]
    for call in module.methods.get("add_argument", ()):
        default = find_keyword_value(call, "default")
        if default is not None and any("port" in str(read_constant_value(one)) for one in call.args):
            ports.append((default, default))
    for node, value in ports:
        text = str(read_constant_value(value))
        if text.isdigit() and int(text) > MAX_PORT:
            yield check.problem("DT042", node, f"there is no port {text}: the last is {MAX_PORT}")
    for call in module.calls_of(names.INIT):
        method = read_constant_value(find_keyword_value(call, "init_method"))
        port = re.search(r"^tcp://.*:(\d+)$", method) if isinstance(method, str) else None
        if port is not None and int(port[1]) > MAX_PORT:
            yield check.problem("DT042", call, f"there is no port {port[1]}: the last is {MAX_PORT}")


def check_sockets_for_gpus(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT068: gloo for GPUs."""
    module = check.module
    for call in module.calls_of(names.INIT):
        backend = find_keyword_value(call, "backend") or (call.args[0] if call.args else None)
        values = find_value_origins(module, backend) if backend is not None else []
        given = {read_constant_value(value.node) or default_of_setting(check, value.node) for value in values}
        if given != {"gloo"} or one_process(check.module):
            continue
        if any(
            isinstance(parent, ast.If) and re.search("nccl|cuda|gpu|win|nt|platform", ast.unparse(parent.test))
            for parent, _ in module.chain(call)
        ):
            continue
        on_gpus = any(
            (ids := find_keyword_value(wrap, "device_ids")) is not None and not isinstance(ids, ast.Constant)
            for wrap in module.calls_of(names.DDP)
        )
        spawned = module.calls_of(*_SPAWNS) and module.calls_of("torch.cuda.device_count")
        moved = module.calls_of(names.DDP) and _moves_to_gpus(module)
        if on_gpus or spawned or moved or module.calls_of("torch.cuda.set_device"):
            yield check.problem("DT068", call, "gloo exchanges the gradients of GPUs over the CPU's memory and sockets")


def _moves_to_gpus(module: SourceFile) -> bool:
    """Return whether a file moves something to a GPU: `.cuda()`, or `.to()` with a device that may be a GPU."""
    if any(isinstance(call.func, ast.Attribute) and not call.keywords for call in module.methods.get("cuda", ())):
        return True
    devices = [call.args[0] for call in module.methods.get("to", ()) if call.args]
    return any("cuda" in ast.unparse(value.node) for device in devices for value in find_value_origins(module, device))


def check_gpus_by_number(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT035 for CUDA_VISIBLE_DEVICES: fixed meeting point."""
    module = check.module
    if not module.trains or module.is_test_file or one_process(module):
        return
    for node, name, value in _find_variable_settings(check):
        given = read_constant_value(module.values(value)[-1]) if value is not None else None
        if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(?:,\s*\d+)*", str(given)):
            message = f"the GPUs are fixed to {given}, whatever the machine has"
            yield check.problem("DT035", node, message, severity="info", fix="let the launcher or the scheduler set it")


def check_never_equal(check: CheckContext) -> Iterator[Problem]:
    """Check rule DT067: variable compared with a number."""
    module = check.module
    for name in ("getenv", "get"):
        for call in module.methods.get(name, ()):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            environment = name == "getenv" or (owner is not None and _is_os_environ(check, owner))
            if environment and len(call.args) == 1 and not call.keywords:
                yield from _check_string_comparison(check, call, read_constant_value(call.args[0]))
    for node in module.nodes_of(ast.Subscript):
        if _is_os_environ(check, node.value):
            yield from _check_string_comparison(check, node, read_constant_value(node.slice))


def _check_string_comparison(check: CheckContext, node: ast.expr, name: object) -> Iterator[Problem]:
    above = check.module.parents.get(node)
    if not isinstance(above, ast.Compare) or len(above.ops) != 1 or not isinstance(above.ops[0], ast.Eq | ast.NotEq):
        return
    other = above.comparators[0] if above.left is node else above.left
    if type(read_constant_value(other)) is int:
        yield check.problem("DT067", above, f"{name} is a string, and never equal to {read_constant_value(other)}")


def _is_optional_setting(check: CheckContext, node: ast.AST) -> bool:
    """Return whether a condition around a node tests if a launcher has set a variable, or holds for one process."""
    return any(
        isinstance(parent, ast.If)
        and any(
            word in ast.unparse(parent.test) for word in ("environ", "getenv", "distributed", "RANK", "slurm", "debug")
        )
        for parent, _ in check.module.chain(node)
    )


CHECKS = (
    check_nccl_variables,
    check_never_destroyed,
    check_fixed_meeting_point,
    check_port_beyond_the_last,
    check_never_equal,
    check_sockets_for_gpus,
    check_gpus_by_number,
)
