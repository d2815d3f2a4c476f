"""`dtctl sandbox`: virtual hosts on this machine with real SSH servers, in which faults can be injected."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import shell
from dtctl.cli import output
from dtctl.errors import SandboxError, UsageError
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.sandbox.layout import Sandbox

app = typer.Typer(
    help="Virtual hosts on this machine: real SSH servers, own addresses, faults on demand.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Which sandbox.  [default: $DTCTL_SANDBOX or `default`]")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Host = Annotated[str, typer.Argument(metavar="NODE", help="A host, such as node1.")]
Other = Annotated[
    str | None, typer.Argument(metavar="OTHER", help="A second host, or control: this machine.", show_default=False)
]


def require_running_sandbox(name: str | None) -> Sandbox:
    """Return the sandbox of this name.

    Raises:
        SandboxError: the sandbox is not running.
    """
    from dtctl.sandbox import control

    sandbox_name = name or control.choose_default_name()
    sandbox = control.find_running_sandbox(sandbox_name)
    if sandbox is None:
        raise SandboxError(f"sandbox {sandbox_name} is not up", hint="dtctl sandbox up --nodes 3")
    return sandbox


@app.command("up")
def up(
    nodes: Annotated[int, typer.Option(metavar="N", help="How many hosts.")] = 3,
    slurm: Annotated[bool, typer.Option("--slurm", help="Also run a Slurm cluster on them.")] = False,
    name: Name = None,
    json_: Json = False,
) -> None:
    """Start virtual hosts: node1, node2, ..."""
    from dtctl.sandbox import control

    sandbox = control.start_sandbox(name or control.choose_default_name(), nodes=nodes, with_slurm=slurm)
    if json_:
        output.emit_json(build_sandbox_json(sandbox))
        return
    output.print_stderr(f"sandbox {sandbox.name}: {format_count(len(sandbox.nodes), 'host')} up", "green")
    print_sandbox_status(sandbox)


@app.command("status")
def status(name: Name = None, json_: Json = False) -> None:
    """Show the hosts, how to log in to them, and the faults in force."""
    from dtctl.sandbox import control

    sandbox = control.find_running_sandbox(name or control.choose_default_name())
    if json_:
        output.emit_json(
            build_sandbox_json(sandbox) if sandbox else {"up": False, "nodes": [], "slurm": False, "faults": []}
        )
    elif sandbox is None:
        output.print_stdout(f"sandbox {name or control.choose_default_name()} is not up")
    else:
        print_sandbox_status(sandbox)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec_(
    node: Host,
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="The command and its arguments, after `--`.")],
    name: Name = None,
) -> int:
    """Run a command on a host, as its login user.

    One word with blanks or `;` in it is run by a shell.
    """
    import subprocess

    from dtctl.sandbox import control

    sandbox = require_running_sandbox(name)
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise UsageError("there is no command", hint="dtctl sandbox exec node1 -- hostname")
    if len(words) == 1 and (shell.find_shell_syntax(words[0]) or " " in words[0].strip()):
        words = ["sh", "-c", words[0]]
    status = subprocess.run(control.enter_argv(sandbox, sandbox.node(node), words), check=False).returncode
    return status if status >= 0 else 128 - status


@app.command("heal")
def heal(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Only this host.  [default: all]", show_default=False)
    ] = None,
    name: Name = None,
) -> None:
    """Undo all faults; killed hosts are switched on again."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.remove_host_faults(sandbox, [sandbox.node(node)] if node else sandbox.nodes)
    remaining = [
        fault for fault in faults.read_recorded_faults(sandbox) if node is not None and node not in fault.split()
    ]
    faults.write_recorded_faults(sandbox, remaining)


@app.command("down")
def down(
    name: Name = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "--force", help="Do not ask, even if processes run on its hosts or files were written there."
        ),
    ] = False,
) -> None:
    """Stop the sandbox and remove everything it created."""
    from dtctl.sandbox import control

    sandbox_name = name or control.choose_default_name()
    if not yes and not _confirm_removal(sandbox_name):
        output.print_stderr("nothing was removed")
        return
    output.print_stderr(
        f"sandbox {sandbox_name} is removed"
        if control.remove_sandbox(sandbox_name)
        else f"sandbox {sandbox_name} was not up"
    )


def _confirm_removal(name: str) -> bool:
    """Return whether to remove a sandbox with the runs and files on its hosts.

    Raises:
        SandboxError: a run is running there, and there is no terminal for the question.
    """
    from dtctl.sandbox import control

    running = control.list_running_runs(name)
    held = [run for run in control.list_sandbox_runs(name) if run not in running]
    is_asked = sys.stdin.isatty() and sys.stderr.isatty()
    if running and not is_asked:
        raise SandboxError(
            f"{format_count(len(running), 'run is', 'runs are')} running on its hosts: {', '.join(running)}",
            where=f"sandbox {name}",
            hint=f"`dtctl stop {running[0]}` stops it gracefully; `dtctl sandbox down --yes` ends and removes "
            "everything",
        )
    if running:
        output.print_stderr(f"this ends what is running: {', '.join(running)}", "yellow")
    if held:
        shown = f"{format_count(len(held), 'run')}: {output.shorten_names(held[::-1])}"
        output.print_stderr(f"this also deletes what its hosts have of {shown}", "yellow")
    if not (running or held) or not is_asked:
        return True
    output.print_stderr("`dtctl fetch RUN` and `dtctl snapshot export RUN` bring it here; remove the sandbox? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


fault = typer.Typer(help="Inject a fault; `heal` undoes it.", no_args_is_help=True)
app.add_typer(fault, name="fault")


def _add_recorded_fault(sandbox: Sandbox, text: str) -> None:
    from dtctl.sandbox import faults

    faults.write_recorded_faults(sandbox, [*faults.read_recorded_faults(sandbox), text])


@fault.command("list")
def fault_list(name: Name = None, json_: Json = False) -> None:
    """List the faults in force."""
    from dtctl.sandbox import faults

    lines = faults.read_recorded_faults(require_running_sandbox(name))
    if json_:
        output.emit_json({"faults": lines})
    for text in [] if json_ else lines:
        output.print_stdout(text)


@fault.command("cut")
def fault_cut(node: Host, other: Other = None, name: Name = None) -> None:
    """Pull a host's cable, or let nothing pass between two hosts."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.disconnect_host(sandbox, sandbox.node(node), sandbox.peer(other) if other else None)
    _add_recorded_fault(sandbox, f"cut {node} {other or ''}".strip())


Port = Annotated[str, typer.Option("--port", metavar="PORT|FIRST:LAST", help="TCP port or range.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="NODE", help="Only from this host, or control: this machine.")
]


@fault.command("drop", short_help="Drop packets to TCP ports of a host, as firewalls do.")
def fault_drop(node: Host, port: Port, from_: From = None, name: Name = None) -> None:
    """Silently drop packets to TCP ports of a host, as a firewall does."""
    _block_node_ports(node, port, from_, name, reject=False)


@fault.command("reject")
def fault_reject(node: Host, port: Port, from_: From = None, name: Name = None) -> None:
    """Reject connections to TCP ports of a host."""
    _block_node_ports(node, port, from_, name, reject=True)


def _block_node_ports(node: str, port: str, source: str | None, name: str | None, *, reject: bool) -> None:
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    sender = sandbox.peer(source) if source else None
    faults.block_ports(sandbox, sandbox.node(node), ports=port, source=sender, reject=reject)
    _add_recorded_fault(
        sandbox, f"{'reject' if reject else 'drop'} {node} --port {port}" + (f" --from {source}" if source else "")
    )


@fault.command("lose-large", short_help="Lose large packets to a host: a wrong MTU.")
def fault_lose_large(node: Host, other: Other = None, name: Name = None) -> None:
    """Lose large packets to a host (from OTHER only): an MTU black hole."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.drop_large_packets(sandbox, sandbox.node(node), sandbox.peer(other) if other else None)
    _add_recorded_fault(sandbox, f"lose-large {node} {other or ''}".strip())


@fault.command("loss")
def fault_loss(
    node: Host,
    percent: Annotated[float, typer.Option(metavar="NUMBER", help="Percentage of packets.")],
    from_: From = None,
    name: Name = None,
) -> None:
    """Lose packets to a host at random."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.drop_packets(sandbox, sandbox.node(node), percent=percent, source=sandbox.peer(from_) if from_ else None)
    _add_recorded_fault(sandbox, f"loss {node} --percent {percent:g}" + (f" --from {from_}" if from_ else ""))


@fault.command("limit", short_help="Limit the bandwidth of a cable, or of a pair.")
def fault_limit(
    node: Host,
    rate: Annotated[str, typer.Option(metavar="RATE", help="Rate, as tc(8) writes it: 50mbit.")],
    other: Other = None,
    name: Name = None,
) -> None:
    """Limit the bandwidth of a host's cable, both ways, or of the way to one OTHER host."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.limit_bandwidth(sandbox, sandbox.node(node), rate=rate, peer=sandbox.node(other) if other else None)
    _add_recorded_fault(sandbox, f"limit {node} --rate {rate} {other or ''}".strip())


@fault.command("kill", short_help="Switch a host off as a power failure does.")
def fault_kill(node: Host, name: Name = None) -> None:
    """Switch a host off as a power failure does; `heal` switches it on again."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.power_off_host(sandbox, sandbox.node(node))
    _add_recorded_fault(sandbox, f"kill {node}")


@fault.command("freeze")
def fault_freeze(node: Host, name: Name = None) -> None:
    """Stop every process of a host; its kernel continues."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.freeze_host(sandbox.node(node))
    _add_recorded_fault(sandbox, f"freeze {node}")


@fault.command("full-disk")
def fault_full_disk(
    node: Host,
    path: Annotated[str, typer.Option(metavar="DIR", help="Folder, relative to the home.")] = ".dtctl",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the disk: 1m.")] = "1m",
    name: Name = None,
) -> None:
    """Put a small disk over a folder of a host's home."""
    from dtctl.sandbox import faults

    sandbox = require_running_sandbox(name)
    faults.fill_disk(sandbox, sandbox.node(node), path=path, size=size)
    _add_recorded_fault(sandbox, f"full-disk {node} --path {path} --size {size}")


def build_sandbox_json(sandbox: Sandbox) -> dict[str, object]:
    """Return the output of `status --json`."""
    from dtctl.sandbox import control, faults, slurm

    return {
        "up": True,
        "name": sandbox.name,
        "rootless": sandbox.rootless,
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "on": control.is_host_running(node),
                "ssh": {
                    "user": sandbox.user,
                    "port": 22,
                    "identity_file": str(sandbox.identity_file),
                    "known_hosts": str(sandbox.known_hosts),
                },
            }
            for node in sandbox.nodes
        ],
        "slurm": sandbox.slurm,
        "slurm_conf": slurm.build_slurm_environment(sandbox).get("SLURM_CONF"),
        "faults": faults.read_recorded_faults(sandbox),
    }


def print_sandbox_status(sandbox: Sandbox) -> None:
    """Print the output of `status`."""
    from dtctl.sandbox import control, faults, slurm

    rows = [[n.name, n.address, "on" if control.is_host_running(n) else "off"] for n in sandbox.nodes]
    output.print_table(rows, header=["HOST", "ADDRESS", "POWER"])
    if sandbox.slurm:
        output.print_stdout(f"Slurm: export SLURM_CONF={slurm.build_slurm_environment(sandbox)['SLURM_CONF']}")
    for text in faults.read_recorded_faults(sandbox):
        output.print_stdout(f"fault: {text}", "yellow")
    first = sandbox.nodes[0]
    if sandbox.rootless:
        output.print_stdout(f"log in: dtctl sandbox exec {first.name} -- sh")
    else:
        output.print_stdout(
            f"log in: ssh -F none -i {sandbox.identity_file} -o UserKnownHostsFile={sandbox.known_hosts} "
            f"{sandbox.user}@{first.address}",
            fold=False,  # must stay one line, to be copied
        )
