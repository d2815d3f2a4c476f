"""Checks of variables of NCCL, RCCL, torch and gloo: different, misspelt, unused or dangerous ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dtctl.doctor.findings import Finding, Status, find_odd_nodes
from dtctl.doctor.node_report import NodeReport
from dtctl.nccl.catalogue import find_closest_name, load_variable_catalogue

RAN = ("env-differs", "env-unknown", "env-dead", "env-dangerous")
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables with a number of threads; libraries ignore a wrong value, and every worker then uses all cores."""
_OURS = ("NCCL_", "RCCL_", "TORCH_", "GLOO_")
Environment = dict[str, tuple[str, str]]
"""Variable -> its value, and the place that sets it."""


def resolve_worker_variables(node: NodeReport, job: Mapping[str, str]) -> Environment:
    """Return the variables of a worker on this node, with their origins.

    Args:
        node: the node.
        job: variables that the spec sets on the node.
    """
    values: Environment = {}
    for path, text in node.facts["conf"].items():
        for line in text.splitlines():
            name, equals, value = line.partition("#")[0].strip().partition("=")
            if equals:
                values[name.strip()] = (value.strip(), path)
    # For NCCL, the environment takes precedence over its configuration files.
    values.update({name: (value, "the login environment") for name, value in node.facts["env"].items()})
    values.update({name: (value, "the spec") for name, value in job.items()})
    return {name: said for name, said in values.items() if name.startswith(_OURS)}


def check_environment_variables(
    reports: Sequence[NodeReport], jobs: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    """Yield all findings about variables.

    Args:
        reports: the nodes.
        jobs: node -> variables that the spec sets on it.
    """
    said = {node.name: resolve_worker_variables(node, jobs.get(node.name, {})) for node in reports}
    for name in COUNTS:
        odd = {
            node.name: text
            for node in reports
            if (text := _read_variable_value(node, jobs.get(node.name, {}), name)) and not _is_thread_count(text)
        }
        if odd:
            yield Finding(
                check="env-unknown",
                status="warn",
                nodes=tuple(odd),
                summary=f"{name}={next(iter(odd.values()))} is not a number of threads",
                fix=f"set {name} to 1 or more, or remove it, and dtctl sets it",
                evidence=tuple(f"{node}: {name}={text}" for node, text in odd.items()),
            )
    amd = {node.name for node in reports if node.facts["vendor"] == "amd"}
    for name in dict.fromkeys(name for variables in said.values() for name in variables):
        where = {node: variables[name] for node, variables in said.items() if name in variables}
        yield from _check_variable_values(name, where, said, by_rccl={*where} <= amd)


def _read_variable_value(node: NodeReport, job: Mapping[str, str], name: str) -> str:
    return job.get(name) or str(node.facts["env"].get(name, ""))


def _is_thread_count(text: str) -> bool:
    """Return whether a text is a number from 1, or a list with one such number for each level of OpenMP's nesting."""
    return all(part.strip().isdecimal() and int(part) > 0 for part in text.split(","))


def _check_variable_values(
    name: str, where: Mapping[str, tuple[str, str]], said: Mapping[str, Environment], *, by_rccl: bool
) -> Iterator[Finding]:
    variable = load_variable_catalogue().get(name)
    evidence = tuple(f"{node}: {name}={value} (from {origin})" for node, (value, origin) in where.items())
    nodes = tuple(where)

    def finding(check: str, status: Status, summary: str, fix: str, who: tuple[str, ...] = nodes) -> Finding:
        return Finding(check=check, status=status, nodes=who, summary=summary, fix=fix, evidence=evidence)

    if variable is None:
        meant = find_closest_name(name)
        if meant:
            yield finding("env-unknown", "warn", f"{name} does not exist; {meant} does", f"write {meant}")
        return
    if variable.kind != "live" and not (by_rccl and variable.rccl):
        instead = variable.instead
        fix = f"unset {name}" + (f"; use {instead}" if instead != "nothing" else "")
        yield finding("env-dead", "warn", f"{name} has no effect or an outdated name: {variable.meaning}", fix)
        return
    values = {node: where[node][0] if node in where else "unset" for node in said}
    odd, usual = find_odd_nodes(values)
    if odd and not variable.differ:
        told = ", ".join(f"{node} {value}" for node, value in values.items())
        fix = (
            f"set it to the same value on all nodes, best in job.env ({name}: {usual})"
            if usual
            else "set it to the same value on all nodes"
        )
        if usual == "unset":
            fix = f"unset {name} on {', '.join(odd)} (it is set in {', '.join(sorted({o for _, o in where.values()}))})"
        yield finding("env-differs", "fail", f"{name} differs between nodes: {told}", fix, odd)
    value = next(iter(where.values()))[0]
    if variable.values and value.upper() not in variable.values:
        known = ", ".join(variable.values)
        yield finding("env-unknown", "warn", f"{name}={value} means nothing", f"use one of {known}")
    elif variable.risky and (value in variable.risky or variable.risky == ("any",)):
        yield finding("env-dangerous", "warn", f"{name}={value}: {variable.danger}", f"unset {name} for real training")
