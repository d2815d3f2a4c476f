"""A spec without a file: `dtctl launch --nodes a,b --slots 2 -- train.py --lr 1e-3`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtctl.errors import SpecError
from dtctl.spec.load import build_spec_from_document
from dtctl.spec.model import Spec
from dtctl.spec.narrow import expand_given_nodes
from dtctl.spec.places import KeyLocations
from dtctl.spec.positions import YamlDocument


def build_quick_spec(
    nodes: str, *, slots: int | None, argv: Sequence[str], overrides: Sequence[str], base_dir: Path
) -> Spec:
    """Return the spec that a command line describes.

    Args:
        nodes: names and ranges; `localhost` alone means this machine without SSH.
        slots: workers per node; None for one per GPU.
        argv: the program and its arguments. A name that ends in `.py` is a script, anything else a command.
        overrides: `KEY=VALUE`, applied in order.
        base_dir: folder whose files are copied to the nodes.

    Raises:
        SpecError: the nodes, an argument or an override are not well formed.
    """
    names = expand_given_nodes(nodes)
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise SpecError(f"{word!r} is not UTF-8 text", where="the command line") from None
    program, *args = argv
    job: dict[str, Any] = {"name": Path(program).stem or "job"}
    if program.endswith(".py"):
        job |= {"script": program, "args": args}
    else:
        job |= {"command": [program, *args]}
    transport = "local" if names == ["localhost"] else "ssh"
    cluster: dict[str, Any] = {"transport": transport, "nodes": names}
    if slots is not None:
        cluster["slots"] = slots
    data: dict[str, Any] = {"cluster": cluster, "job": job}
    document = YamlDocument(data, KeyLocations("the command line"), {})
    return build_spec_from_document(document, base_dir=base_dir, overrides=overrides)
