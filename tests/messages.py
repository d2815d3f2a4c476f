"""All messages between the control machine and nodes, by family and direction."""

from __future__ import annotations

import importlib
import pkgutil

from dtctl.supervisor import messages
from dtctl.supervisor.messages.base import Message, Quit, Refusal, index_message_types
from dtctl.supervisor.messages.setup import PushEnd, PushManifestEnd
from dtctl.supervisor.requests import ANSWERED_BY, NodeRequests, find_module

MODULES = [
    importlib.import_module(f"{messages.__name__}.{each.name}") for each in pkgutil.iter_modules(messages.__path__)
]
FAMILIES: dict[str, type[NodeRequests]] = {}
"""Name in the table -> the class."""
for _name, _ops in ANSWERED_BY.items():
    _module, _kind = find_module(_ops[0])
    FAMILIES[_name] = getattr(importlib.import_module(_module), _kind)
REQUESTS = {op: kind for family in FAMILIES.values() for op, kind in family.KINDS.items()}


def answers() -> list[dict[str, type[Message]]]:
    """What nodes may send, a family each; a refusal in all."""
    asked = {*REQUESTS.values(), PushEnd, PushManifestEnd, Quit}
    return [
        index_message_types(
            Refusal, *(kind for kind in vars(module).values() if _is_message(kind) and kind not in asked)
        )
        for module in MODULES
    ]


def _is_message(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Message) and value is not Message
