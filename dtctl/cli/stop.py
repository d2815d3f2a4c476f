"""`dtctl stop`: end a run and prove that nothing of it is left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtctl.cli import output


def stop(
    run: Annotated[str | None, typer.Argument(help="The run.  [default: the newest]", show_default=False)] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Stop a run on all its nodes; works when its launcher is gone, too."""
    from dtctl.launch import stop as stopping
    from dtctl.launch.assemble import cluster_of_run
    from dtctl.launch.records.record import find_run

    record = find_run(Path.cwd(), run)
    if record.info().slurm:
        from dtctl.cli.common.launch_slurm import stop_job

        return stop_job(record, as_json=json_)
    grace_s = float(record.plan().get("grace_s", 10.0))
    launcher = stopping.by_launcher(record, wait_s=grace_s + 15)
    # Looked at on the nodes in any case: the launcher's word is good, a look is better.
    cluster = cluster_of_run(record)
    stopped = stopping.on_nodes(record, cluster.targets, cluster.make_transport(), note=not launcher)
    counts = [answer for answer in stopped.left.values() if isinstance(answer, int)]
    silent = {node: answer for node, answer in stopped.left.items() if not isinstance(answer, int)}
    if json_:
        output.emit_json(
            {
                "run": record.run,
                "left_behind": None if silent else sum(counts),
                "nodes": {
                    node: answer if isinstance(answer, int) else str(answer) for node, answer in stopped.left.items()
                },
            }
        )
    else:
        nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
        output.out(f"{sum(counts)} processes left on {nodes}")
    for error in silent.values():
        output.error(error)
    return 6 if silent else 0
