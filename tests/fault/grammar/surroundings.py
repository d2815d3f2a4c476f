# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Second collection: libraries, interpreters in wrappers, start-up files, names and variables, and other moments."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, Collection, nodes_with


def add(made: Collection) -> None:
    _libraries(made)
    _wrappers(made)
    _logins(made)
    _names(made)
    _moments(made)


def _libraries(made: Collection) -> None:
    broken = "mkdir -p /tmp/lib; : >/tmp/lib/libstdc++.so.6"
    node = made.host()
    made.add("library: an empty libstdc++ in LD_LIBRARY_PATH", "surroundings", "python-environment torch collective", [node], r"LD_LIBRARY_PATH",
             (node, broken), spec=nodes_with(node, env={"LD_LIBRARY_PATH": "/tmp/lib"}))  # fmt: skip
    node = made.host()
    made.add("library: an empty libstdc++, by the start-up file", "surroundings", "python-environment torch collective", [node], r"LD_LIBRARY_PATH",
             (node, broken + "; rc 'export LD_LIBRARY_PATH=/tmp/lib'"))  # fmt: skip
    made.add("variable: TORCH_LOGS has no such value", "surroundings", "collective env-unknown torch python-environment", ALL, "TORCH_LOGS",
             spec={"job.env": {"TORCH_LOGS": "loud"}})  # fmt: skip
    made.add("variable: OMP_NUM_THREADS is a word", "surroundings", "env-unknown", ALL, "OMP_NUM_THREADS",
             spec={"job.env": {"OMP_NUM_THREADS": "all"}}, fatal=False)  # fmt: skip
    made.add("variable: failed collectives are ignored", "surroundings", "env-dangerous", ALL, "TORCH_NCCL_ASYNC_ERROR_HANDLING",
             spec={"job.env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}, fatal=False)  # fmt: skip
    node = made.host()
    made.add("variable: NCCL_ALGO on one node", "surroundings", "env-differs", [node], r"NCCL_ALGO",
             spec=nodes_with(node, env={"NCCL_ALGO": "Ring"}))  # fmt: skip
    made.add("plan: the rendezvous port is that of SSH", "surroundings", "rendezvous-port", ["node1"], r"ss -|lsof|auto|another port",
             spec={"network.rendezvous_port": 22})  # fmt: skip
    for name in ("json/__init__", "enum", "re"):
        module = name.partition("/")[0]
        made.add(f"python: {name}.py beside the script", "surroundings", "shadowing", ALL, rf"(rename|move|mv).*{module}|{module}.*(rename|move)",
                 files={f"{name}.py": "VALUES = [1]\n"})  # fmt: skip


def _wrappers(made: Collection) -> None:
    wrap = "mkdir -p /tmp/w; printf '#!/bin/sh\\n%s\\n' '{}' >/tmp/w/python3; chmod 755 /tmp/w/python3"
    for word, checks, fix, body, fatal in (
        ("closes standard input", "python reach start-up", r"cluster\.python|wrapper|Python", 'exec @PYTHON@ "$@" </dev/null', True),
        ("prints a word after 3 s", "shell-output python reach", r"print|output|cluster\.python|wrapper", '(sleep 3; echo tick) & exec @PYTHON@ "$@"', True),
        ("limits its address space", "limits memory python-environment torch collective", r".", 'ulimit -v 700000; exec @PYTHON@ "$@"', True),
        ("forgets its arguments", "python", r"cluster\.python|wrapper|Python", "exec @PYTHON@", True),
        ("takes 6 s to start", "slow-login python reach", r".", 'sleep 6; exec @PYTHON@ "$@"', False),
        ("allows 40 open files", "nofile", r"ulimit -n|nofile", 'ulimit -n 40; exec @PYTHON@ "$@"', True),
    ):  # fmt: skip
        node = made.host()
        made.add(
            f"wrapper: Python {word}",
            "wrappers",
            checks,
            [node],
            fix,
            (node, wrap.format(body)),
            spec=nodes_with(node, python="/tmp/w/python3"),
            fatal=fatal,
        )


def _logins(made: Collection) -> None:
    start = r"\.bashrc|start-up|interactive"
    for word, text, checks, fix in (
        ("closes standard output", "exec >/dev/null", "shell-output start-up python reach", start),
        ("ends at the first error", "set -e; false", "shell-output start-up python", start),
        ("limits its address space", "ulimit -v 700000", "limits memory", r"ulimit -v|\bas\b|address space|LimitAS"),
        ("limits its files to 1 KB", "ulimit -f 1", "limits workdir disk tmpdir", r"ulimit -f|fsize|LimitFSIZE"),
        ("replaces the shell by another program", "exec sleep 300", "start-up reach", start),
    ):
        node = made.host()
        made.add(f"start-up file: {word}", "way in", checks, [node], fix, (node, f"rc '{text}'"))


def _names(made: Collection) -> None:
    fix = r"/etc/hosts"
    node = made.host()
    made.add("names: an empty /etc/hosts", "names", "names", [node], fix, (node, "hosts 's/.*//'"), fatal=False)
    node = made.host()
    made.add("names: its own name has a second, wrong address", "names", "names", [node], fix,
             (node, f"hosts 's/^\\([0-9.]*\\) {node}$/10.255.255.9 {node}\\n&/'"), fatal=False)  # fmt: skip
    node = made.host()
    made.add("names: its own name is ::1", "names", "loopback-name names", [node], fix,
             (node, f"hosts 's/^[0-9.]* {node}$/::1 {node}/'"), fatal=False)  # fmt: skip


def _moments(made: Collection) -> None:
    for words, when, what in (
        ("asking", "while nodes are asked", "freeze"),
        ("opening ports", "while ports are opened", "kill"),
        ("testing every pair", "while pairs are tested", "freeze"),
        ("testing every pair", "while pairs are tested", "cut"),
        ("round 2", "in the second round", "kill"),
        ("adding up", "while numbers are added up", "cut"),
    ):
        node = made.host()
        made.add(f"moment: {what} {when}", "moments", "reach", [node], r".", during=((words, node, what),))
    node = made.host()
    made.add("moment: inbound ports are closed after 6 s", "moments", "data-ports stream collective reach packet-loss bandwidth", [node], r".",
             (node, "later 6 iptables -I INPUT -i eth0 -p tcp --dport 32768:60999 -j DROP"))  # fmt: skip
