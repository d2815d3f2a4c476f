"""Rules about what surrounds the job: DT029, DT030, DT035, DT042, DT067, DT068."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dtctl.lint import names
from dtctl.lint.check import Check
from dtctl.lint.checks.loading import default_of_setting
from dtctl.lint.flow import default_of, function_of, origins
from dtctl.lint.model import Problem, Severity
from dtctl.lint.ranks import one_process
from dtctl.lint.source_file import SourceFile, constant, key, keyword
from dtctl.lint.variables import MAX_PORT, NAME, judge

_SPAWNS = (
    "torch.multiprocessing.spawn",
    "torch.multiprocessing.start_processes",
    "torch.multiprocessing.Process",
    "multiprocessing.Process",
)
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def _settings(check: Check) -> Iterator[tuple[ast.AST, str, ast.expr | None]]:
    """Variables that the file sets, whatever the launcher has set: (node, name, value)."""
    module = check.module
    for node in module.nodes_of(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(check, target.value):
                name = constant(target.slice)
                if isinstance(name, str):
                    yield node, name, node.value
    for call in module.methods.get("update", ()):
        if isinstance(call.func, ast.Attribute) and _is_environ(check, call.func.value):
            yield from ((value, name, value) for name, value in _updated(call))
    for call in module.calls_of("os.putenv"):
        if len(call.args) == 2 and isinstance(name := constant(call.args[0]), str):
            yield call, name, call.args[1]


def _updated(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keys and values of `mapping.update({key: value}, key=value)`."""
    for mapping in call.args:
        if isinstance(mapping, ast.Dict):
            for variable, value in zip(mapping.keys, mapping.values, strict=True):
                if isinstance(name := constant(variable), str):
                    yield name, value
    for argument in call.keywords:
        if argument.arg is not None:
            yield argument.arg, argument.value


def _is_environ(check: Check, node: ast.expr) -> bool:
    return check.module.name(node) == "os.environ" or key(node) in ("os.environ", "environ")


def variables(check: Check) -> Iterator[Problem]:
    """DT029."""
    module = check.module
    if not any(prefix in module.text for prefix in ("NCCL_", "RCCL_", "GLOO_")):
        return
    starts = [*module.calls_of(names.INIT)]
    for function in [function_def for group in module.functions.values() for function_def in group]:
        if any(module.scope(call) is function for call in module.calls_of(names.INIT)):
            starts += module.methods.get(function.name, [])
    for node, name, value in _settings(check):
        if not NAME.match(name):
            continue
        line, scope = node.lineno, module.scope(node)  # type: ignore[attr-defined]
        if any(call.lineno < line and module.scope(call) is scope and module.dominates(call, node) for call in starts):
            yield check.problem("DT029", node, f"{name} is set after init_process_group, which has read it already")
            continue
        literal = constant(value)
        group = judge(name, str(literal) if literal is not None else None)
        if group is not None:
            severity, message, fix = group
            yield check.problem("DT029", node, message, severity=severity, fix=fix)


def never_destroyed(check: Check) -> Iterator[Problem]:
    """DT030."""
    module = check.module
    if not check.project.says(module, re.compile("init_process_group|deepspeed.init_distributed|deepspeed.initialize")):
        return
    if check.project.runs_loop(module) or _destroys(check, module) or one_process(check.module):
        return
    importers = check.project.importers(module)
    if any(_destroys(check, source) for source in importers):
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
    # It is started by a function of another file: reported where the main program calls that.
    for call in _starting(module):
        yield check.problem("DT030", call, f"`{key(call.func)}` starts the process group, which is never destroyed")
        return


def _destroys(check: Check, module: SourceFile) -> bool:
    """Return whether a module, or one that it imports, destroys the group of all ranks, not only its own."""
    return any(
        not call.args and not call.keywords
        for source in check.project.having(module, "destroy_process_group")
        for call in source.methods.get("destroy_process_group", ())
    )


def _starting(module: SourceFile) -> Iterator[ast.Call]:
    """Calls of functions of other files that start the process group."""
    for name in sorted(module.methods):
        if re.search(r"init|setup|dist|launch|ddp|prepare|slurm", name, re.IGNORECASE):
            for call in module.methods[name]:
                target = function_of(module, call)
                if target is not None and target.module is not module and _starts_group(target.module, target.node):
                    yield call


def _starts_group(module: SourceFile, function: ast.AST, depth: int = 2) -> bool:
    """Return whether a function starts the process group, itself or in another function of its file."""
    if any(module.scope(start) is function for start in module.calls_of(names.INIT)):
        return True
    others = [
        other for name, group in module.functions.items() for other in group
        if depth and any(module.scope(call) is function for call in module.methods.get(name, ()))
    ]  # fmt: skip
    return any(_starts_group(module, other, depth - 1) for other in others if other is not function)


def fixed_meeting_point(check: Check) -> Iterator[Problem]:
    """DT035."""
    module = check.module
    if one_process(check.module):
        return
    single_node = check.cluster.single_node or any(
        check.project.calls(module, starter) for starter in _SPAWNS
    )  # starts its ranks on its node
    severity: Severity = "error" if check.cluster.multi_node else "info" if single_node else "warning"
    for node, name, value in _settings(check):
        if (
            name not in _RENDEZVOUS
            or value is None
            or not isinstance(number := _fixed(module, value), str | int)
            or _optional(check, node)
        ):
            continue
        message = f"{name} is fixed to {number!r}, whatever the launcher says"
        yield check.problem("DT035", node, message, severity=severity)
    yield from _addresses(check)
    for call in module.calls_of(*names.SPAWNS):
        count = keyword(call, "nprocs")
        for started in origins(module, count) if count is not None else ():
            number = constant(started.node)
            if type(number) is int and number > 1 and started.module is module:
                message = f"the number of processes is fixed to {number}"
                yield check.problem("DT035", started.node, message, severity="info")
    for call in module.calls_of(names.INIT):
        if _optional(check, call):
            continue
        size, method = keyword(call, "world_size"), keyword(call, "init_method")
        number, text = constant(size), constant(method)
        if isinstance(number, int) and number > 1 and size is not None:
            yield check.problem("DT035", size, f"world_size is fixed to {number}", severity=severity)
        elif isinstance(text, str) and text.startswith("tcp://") and method is not None:
            yield check.problem("DT035", method, f"the address is fixed to {text}", severity=severity)


def _fixed(module: SourceFile, value: ast.expr) -> object:
    """Return the literal that a value is, also as `str(port)` of a parameter that has it as its default."""
    if isinstance(value, ast.Call) and key(value.func) in ("str", "int") and len(value.args) == 1:
        value = value.args[0]
        function = module.scope(value)
        if isinstance(value, ast.Name) and value.id.endswith("port"):
            return constant(default_of(function, value.id))
    return constant(value)


def _addresses(check: Check) -> Iterator[Problem]:
    """Addresses with a port that a file sets for init_method somewhere: a default, or an attribute."""
    module = check.module
    if not module.trains:
        return
    given: list[tuple[ast.AST, ast.expr]] = [(node, node.value) for node in module.nodes_of(ast.Assign)]
    given += [(default, default) for call in module.methods.get("add_argument", ())
              if (default := keyword(call, "default")) is not None]  # fmt: skip
    for node, value in given:
        text = ast.unparse(value) if isinstance(value, ast.JoinedStr | ast.Constant) else ""
        if re.search(r"[\"']tcp://[^\"']*:\d+[\"']$", text):
            yield check.problem("DT035", node, f"the address is fixed to {text.strip('f')}", severity="info")


def port_beyond_the_last(check: Check) -> Iterator[Problem]:
    """DT042."""
    module = check.module
    ports = [(node, value) for node, name, value in _settings(check) if name == "MASTER_PORT" and value is not None]
    ports += [
        (call, call.args[1])
        for call in module.methods.get("setdefault", ())
        if len(call.args) == 2 and constant(call.args[0]) == "MASTER_PORT"
    ]
    for call in module.methods.get("add_argument", ()):
        default = keyword(call, "default")
        if default is not None and any("port" in str(constant(one)) for one in call.args):
            ports.append((default, default))
    for node, value in ports:
        text = str(constant(value))
        if text.isdigit() and int(text) > MAX_PORT:
            yield check.problem("DT042", node, f"there is no port {text}: the last is {MAX_PORT}")
    for call in module.calls_of(names.INIT):
        method = constant(keyword(call, "init_method"))
        port = re.search(r"^tcp://.*:(\d+)$", method) if isinstance(method, str) else None
        if port is not None and int(port[1]) > MAX_PORT:
            yield check.problem("DT042", call, f"there is no port {port[1]}: the last is {MAX_PORT}")


def sockets_for_gpus(check: Check) -> Iterator[Problem]:
    """DT068."""
    module = check.module
    for call in module.calls_of(names.INIT):
        backend = keyword(call, "backend") or (call.args[0] if call.args else None)
        values = origins(module, backend) if backend is not None else []
        given = {constant(value.node) or default_of_setting(check, value.node) for value in values}
        if given != {"gloo"} or one_process(check.module):
            continue
        if any(
            isinstance(parent, ast.If) and re.search("nccl|cuda|gpu|win|nt|platform", ast.unparse(parent.test))
            for parent, _ in module.chain(call)
        ):
            continue
        on_gpus = any(
            (ids := keyword(wrap, "device_ids")) is not None and not isinstance(ids, ast.Constant)
            for wrap in module.calls_of(names.DDP)
        )
        spawned = module.calls_of(*_SPAWNS) and module.calls_of("torch.cuda.device_count")
        moved = module.calls_of(names.DDP) and _moves_to_gpus(module)
        if on_gpus or spawned or moved or module.calls_of("torch.cuda.set_device"):
            yield check.problem("DT068", call, "gloo exchanges the gradients of GPUs over the CPU's memory and sockets")


def _moves_to_gpus(module: SourceFile) -> bool:
    """Return whether a file moves something to a GPU: `.cuda()`, or `.to()` of a device that may be one."""
    if any(isinstance(call.func, ast.Attribute) and not call.keywords for call in module.methods.get("cuda", ())):
        return True
    devices = [call.args[0] for call in module.methods.get("to", ()) if call.args]
    return any("cuda" in ast.unparse(value.node) for device in devices for value in origins(module, device))


def gpus_by_number(check: Check) -> Iterator[Problem]:
    """DT035 of CUDA_VISIBLE_DEVICES."""
    if not check.module.trains or check.module.tests or one_process(check.module):
        return
    for node, name, value in _settings(check):
        if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(?:,\s*\d+)*", str(constant(value))):
            message = f"the GPUs are fixed to {constant(value)}, whatever the machine has"
            yield check.problem(
                "DT035", node, message, severity="info", fix="leave it to the launcher or the scheduler"
            )


def never_equal(check: Check) -> Iterator[Problem]:
    """DT067."""
    module = check.module
    for name in ("getenv", "get"):
        for call in module.methods.get(name, ()):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            environment = name == "getenv" or (owner is not None and _is_environ(check, owner))
            if environment and len(call.args) == 1 and not call.keywords:
                yield from _compared(check, call, constant(call.args[0]))
    for node in module.nodes_of(ast.Subscript):
        if _is_environ(check, node.value):
            yield from _compared(check, node, constant(node.slice))


def _compared(check: Check, node: ast.expr, name: object) -> Iterator[Problem]:
    above = check.module.parents.get(node)
    if not isinstance(above, ast.Compare) or len(above.ops) != 1 or not isinstance(above.ops[0], ast.Eq | ast.NotEq):
        return
    other = above.comparators[0] if above.left is node else above.left
    if type(constant(other)) is int:
        yield check.problem("DT067", above, f"{name} is a string, and never equal to {constant(other)}")


def _optional(check: Check, node: ast.AST) -> bool:
    """Return whether a condition around it tests whether a launcher has set it, or stands for one process."""
    return any(
        isinstance(parent, ast.If)
        and any(
            word in ast.unparse(parent.test) for word in ("environ", "getenv", "distributed", "RANK", "slurm", "debug")
        )
        for parent, _ in check.module.chain(node)
    )


CHECKS = (
    variables,
    never_destroyed,
    fixed_meeting_point,
    port_beyond_the_last,
    never_equal,
    sockets_for_gpus,
    gpus_by_number,
)
