"""The files that a plan becomes: what is sent to the nodes, and what `--out` writes."""

from __future__ import annotations

from pathlib import Path

import dtctl
from dtctl.plan.model import NodePlan, Plan
from dtctl.render import render, template_folders

NODE_TEMPLATE = "node.sh.j2"


def node_script(plan: Plan, node: NodePlan, *, base_dir: Path) -> str:
    """The script that `node` runs.

    Args:
        plan: the attempt.
        node: one of its nodes.
        base_dir: folder of the spec, whose `templates/` may replace dtctl's template.

    Raises:
        RenderError: the template is missing or wrong.
    """
    values = {"version": dtctl.__version__, "plan": plan, "node": node}
    return render(NODE_TEMPLATE, values, folders=template_folders(base_dir))


def node_scripts(plan: Plan, *, base_dir: Path) -> dict[str, str]:
    """Node name -> its script, in node rank order.

    Raises:
        RenderError: the template is missing or wrong.
    """
    return {node.name: node_script(plan, node, base_dir=base_dir) for node in plan.nodes}
