"""A spec without a file: `dtctl launch --nodes a,b --slots 2 -- train.py --lr 1e-3`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtctl.spec import nodeset
from dtctl.spec import overrides as setting
from dtctl.spec.model import Spec


def spec_from_nodes(
    nodes: str, *, slots: int | None, argv: Sequence[str], overrides: Sequence[str], base_dir: Path
) -> Spec:
    """The spec that a command line describes.

    Args:
        nodes: names and ranges; `localhost` alone means this machine without SSH.
        slots: workers per node; None for one per GPU.
        argv: the program and its arguments. What ends in `.py` is a script, anything else a command.
        overrides: `KEY=VALUE`, applied in order.
        base_dir: folder whose files are brought to the nodes.

    Raises:
        SpecError: the nodes or an override are not well formed.
    """
    names = nodeset.expand(nodes)
    program, *args = argv
    job: dict[str, Any] = {"name": Path(program).stem}
    if program.endswith(".py"):
        job |= {"script": program, "args": args}
    else:
        job |= {"command": [program, *args]}
    transport = "local" if names == ["localhost"] else "ssh"
    cluster: dict[str, Any] = {"transport": transport, "nodes": names}
    if slots is not None:
        cluster["slots"] = slots
    data: dict[str, Any] = {"cluster": cluster, "job": job}
    for override in overrides:
        setting.apply(data, override)
    from pydantic import ValidationError

    from dtctl.spec.load import explain

    try:
        spec = Spec.model_validate(data)
    except ValidationError as exc:
        raise explain(exc, source="the command line") from None
    return spec.model_copy(update={"base_dir": base_dir})
