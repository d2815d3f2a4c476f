"""Replacement of host names in printed output by the node names of the spec.

Programs, torch and torchrun print a machine's host name, which its user may never have seen. A host name that could be
any word is replaced only where a host is expected: before a port, or in torchrun's table.
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
    """Host names of the nodes, each with the node's name in the spec."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        """Use the host name of each node; a name that several nodes have, such as `localhost`, is not replaced."""
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
            rf"(?<=host      : )(?:{names}){_DOMAIN}(?![\w-])",  # This form is in torchrun's table.
        ]
        if unmistakable:
            anywhere = "|".join(re.escape(name) for name in sorted(unmistakable, key=len, reverse=True))
            rules += [
                rf"(?<![\w./@-])(?:{anywhere}){_DOMAIN}(?=:\d)",
                rf"(?<![\w./@-])(?:{anywhere})(?![\w/-]|\.\w)",
            ]
        self._pattern = re.compile("|".join(rules))

    def node_of(self, host: str) -> str:
        """Return the node with this host name; the host name itself if there is none."""
        return self.nodes.get(host) or self.nodes.get(host.partition(".")[0], host)

    def replace_names(self, text: str) -> str:
        """Return the text with node names in place of host names."""
        return self._pattern.sub(lambda found: self.node_of(found[0]), text) if self.nodes else text
