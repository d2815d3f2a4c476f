"""`dtctl nccl`: what variables mean, and which ones a cluster needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Yes, agreed

if TYPE_CHECKING:
    from dtctl.nccl.catalogue import NcclVariable

app = typer.Typer(
    help="Variables of NCCL, RCCL, torch and gloo: what they mean, and which ones a cluster needs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command("explain")
def explain(
    names_: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Variables: NCCL_SOCKET_IFNAME MASTER_ADDR, or one with a value, A=B."),
    ],
    json_: Json = False,
) -> None:
    """Say what variables of NCCL, RCCL, torch, gloo, launchers and CUDA mean, their defaults, and what is dangerous."""
    from dataclasses import asdict

    from dtctl.errors import UsageError
    from dtctl.nccl.catalogue import catalogue, closest_name

    variables = catalogue()
    settings_asked = [word.partition("=")[::2] for name in names_ for word in name.split(",") if word.strip()]
    settings = [(name.strip().upper(), value) for name, value in settings_asked]
    known = [(variables[name], value) for name, value in settings if name in variables]
    unknown = list(dict.fromkeys(name for name, _ in settings if name not in variables))
    if json_:
        output.emit_json({"variables": [asdict(variable) for variable, _ in known], "unknown": unknown})
    else:
        for variable, value in known:
            _explain(variable, value)
    if unknown:
        near = [suggestion for name in unknown if (suggestion := closest_name(name))]
        raise UsageError(
            f"dtctl does not know {', '.join(unknown)}", hint=f"did you mean {', '.join(near)}?" if near else None
        )


def _explain(variable: NcclVariable, value: str) -> None:
    from dtctl.lint.variables import judge

    output.out(variable.name, "bold")
    output.out(f"  {variable.meaning}")
    rows = {"default": variable.default, "since": variable.since, "values": ", ".join(variable.values)}
    rows |= {"danger": variable.danger, "use instead": variable.instead}
    rows["with RCCL"] = variable.rccl
    rows["on nodes"] = "may differ" if variable.differ else ""
    for label, text in rows.items():
        if text:
            output.out(f"  {label}: {text}")
    if value and (judged := judge(variable.name, value)):
        _, message, fix = judged
        output.out(f"  about {value}: {message.removeprefix(f'{variable.name}={value}: ')}; {fix}", "yellow")


@app.command("env")
def env(
    spec: Annotated[Path, typer.Argument(help="The spec.")] = Path(names.SPEC_FILE),
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Show, per node, the variables that its network needs, each with its reason, and what is set there now."""
    from dtctl.doctor.settings import node_settings
    from dtctl.launch.cluster import cluster_of
    from dtctl.nccl.profiles import NOTES
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, ())
    agreed(checked, yes=yes)
    rows = node_settings(checked, cluster_of(checked, start=True))
    if json_:
        output.emit_json({"nodes": rows})
        return
    for row in rows:
        _show(row)
    for profile in dict.fromkeys(row["profile"] for row in rows):
        if profile in NOTES:
            output.out(f"note for {profile}: {NOTES[profile]}")


def _show(row: dict[str, Any]) -> None:
    output.out(f"{row['node']}: profile {row['profile']}", "bold")
    for setting in row["set"]:
        output.out(f"  {setting['name']}={setting['value']}  # {setting['reason']}")
    if not row["set"]:
        output.out("  no variable is needed")
    if row["unusable"]:
        output.out(f"  cannot be used: {row['unusable']}", "red")
    if row["unreached"]:
        output.out(f"  cannot reach {', '.join(row['unreached'])} over it; dtctl doctor says why", "red")
    for setting in row["now"]:
        output.out(f"  now: {setting['name']}={setting['value']} (from {setting['origin']})")
