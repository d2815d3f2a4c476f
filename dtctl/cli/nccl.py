"""`dtctl nccl`: explain variables, and show which ones a cluster needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Yes, require_spec_agreement

if TYPE_CHECKING:
    from dtctl.nccl.catalogue import NcclVariable

app = typer.Typer(
    help="Variables of NCCL, RCCL, torch and gloo: what they mean, and which ones a cluster needs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@app.command("explain", short_help="Explain variables: meaning, default, dangers.")
def explain(
    names_: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Variables: NCCL_SOCKET_IFNAME MASTER_ADDR, or one with a value, A=B."),
    ],
    json_: Json = False,
) -> None:
    """Explain the variables of NCCL, RCCL, torch, gloo, launchers and CUDA, their defaults, and what is dangerous."""
    from dataclasses import asdict

    from dtctl.errors import UsageError
    from dtctl.nccl.catalogue import find_closest_name, load_variable_catalogue

    variables = load_variable_catalogue()
    settings_asked = [word.partition("=")[::2] for name in names_ for word in name.split(",") if word.strip()]
    settings = [(name.strip().upper(), value) for name, value in settings_asked]
    known = [(variables[name], value) for name, value in settings if name in variables]
    unknown = list(dict.fromkeys(name for name, _ in settings if name not in variables))
    if json_:
        output.emit_json({"variables": [asdict(variable) for variable, _ in known], "unknown": unknown})
    else:
        for variable, value in known:
            _print_variable_help(variable, value)
    if unknown:
        near = [suggestion for name in unknown if (suggestion := find_closest_name(name))]
        raise UsageError(
            f"dtctl does not know {', '.join(unknown)}", hint=f"did you mean {', '.join(near)}?" if near else None
        )


def _print_variable_help(variable: NcclVariable, value: str) -> None:
    from dtctl.lint.variables import check_variable_setting

    output.print_stdout(variable.name, "bold")
    output.print_stdout(f"  {variable.meaning}")
    rows = {"default": variable.default, "since": variable.since, "values": ", ".join(variable.values)}
    rows |= {"danger": variable.danger, "use instead": variable.instead}
    rows["with RCCL"] = variable.rccl
    rows["on nodes"] = "may differ" if variable.differ else ""
    for label, text in rows.items():
        if text:
            output.print_stdout(f"  {label}: {text}")
    if value and (judged := check_variable_setting(variable.name, value)):
        _, message, fix = judged
        output.print_stdout(f"  about {value}: {message.removeprefix(f'{variable.name}={value}: ')}; {fix}", "yellow")


@app.command("env", short_help="Show the variables that each node needs, and why.")
def env(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec.")] = Path(names.SPEC_FILE),
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Show, per node, the variables that its network needs, each with its reason, and what is set there now."""
    from dtctl.doctor.settings import list_node_settings
    from dtctl.launch.cluster import resolve_cluster
    from dtctl.nccl.profiles import NOTES
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, ())
    require_spec_agreement(checked, yes=yes)
    rows = list_node_settings(checked, resolve_cluster(checked, start=True))
    if json_:
        output.emit_json({"nodes": rows})
        return
    for row in rows:
        _print_node_variables(row)
    for profile in dict.fromkeys(row["profile"] for row in rows):
        if profile in NOTES:
            output.print_stdout(f"note for {profile}: {NOTES[profile]}")


def _print_node_variables(row: dict[str, Any]) -> None:
    output.print_stdout(f"{row['node']}: profile {row['profile']}", "bold")
    for setting in row["set"]:
        output.print_stdout(f"  {setting['name']}={setting['value']}  # {setting['reason']}")
    if not row["set"]:
        output.print_stdout("  no variable is needed")
    if row["unusable"]:
        output.print_stdout(f"  cannot be used: {row['unusable']}", "red")
    if row["unreached"]:
        output.print_stdout(
            f"  cannot reach {', '.join(row['unreached'])} over it; `dtctl doctor` shows the reason", "red"
        )
    for setting in row["now"]:
        output.print_stdout(f"  now: {setting['name']}={setting['value']} (from {setting['origin']})")
