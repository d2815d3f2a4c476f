"""The names that hosts have themselves, replaced by those of the spec in what a program has printed.

A program, torch and torchrun print a machine's own name, which its user may never have seen. A name that could be any
word counts only where a host must stand: before a port, or in torchrun's table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[\w.-]*\w)?")
_ADDRESS: Final = re.compile(r"[\d.]+")
_DOMAIN: Final = r"(?:\.[A-Za-z][\w-]*)*"


class HostNames:
    """Own names of hosts, and the nodes of the spec that they are."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        """Take node -> own name; what several nodes are called, such as `localhost`, names none of them."""
        called = Counter(hosts.values())
        self.nodes: dict[str, str] = {}
        for node, host in hosts.items():
            short = host if _ADDRESS.fullmatch(host) else host.partition(".")[0]
            if _NAME.fullmatch(host) and called[host] == 1 and node not in (host, short):
                self.nodes |= {host: node, short: node}
        if not self.nodes:
            return
        names = "|".join(re.escape(name) for name in sorted(self.nodes, key=len, reverse=True))
        unmistakable = [name for name in self.nodes if not name.isalpha()]
        rules = [
            rf"(?<=\[)(?:{names}){_DOMAIN}(?=\]:\d)",
            rf"(?<=host      : )(?:{names}){_DOMAIN}(?![\w-])",  # torchrun's table
        ]
        if unmistakable:
            anywhere = "|".join(re.escape(name) for name in sorted(unmistakable, key=len, reverse=True))
            rules += [
                rf"(?<![\w./@-])(?:{anywhere}){_DOMAIN}(?=:\d)",
                rf"(?<![\w./@-])(?:{anywhere})(?![\w/-]|\.\w)",
            ]
        self._pattern = re.compile("|".join(rules))

    def node_of(self, host: str) -> str:
        """Return the node that a host is; the name itself of a host that is none."""
        return self.nodes.get(host) or self.nodes.get(host.partition(".")[0], host)

    def replace_names(self, text: str) -> str:
        """Return the text with the nodes' names in it."""
        return self._pattern.sub(lambda found: self.node_of(found[0]), text) if self.nodes else text
