# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Python on a node: its variables, modules that hide others, wrappers, clocks."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, Collection, nodes_with


def add(made: Collection) -> None:
    for variable, value in (
        ("PYTHONHOME", "/nowhere"),
        ("PYTHONIOENCODING", "utf-99"),
        ("PYTHONHASHSEED", "abc"),
        ("PYTHONMALLOC", "fast"),
        ("PYTHONUTF8", "2"),
    ):
        node = made.host()
        made.add(
            f"python: {variable} on one node",
            "python",
            "python-environment",
            [node],
            variable,
            spec=nodes_with(node, env={variable: value}),
        )
        if variable in ("PYTHONHOME", "PYTHONHASHSEED"):
            made.add(
                f"python: {variable} for all",
                "python",
                "python-environment",
                ALL,
                variable,
                spec={"job.env": {variable: value}},
            )
    for name, fatal in (
        ("random", True),
        ("torch", True),
        ("types", True),
        ("socket", True),
        ("numpy", True),
        ("queue", True),
        ("statistics", False),
        ("logging", True),
    ):
        made.add(f"python: {name}.py beside the script", "python", "shadowing", ALL, rf"(rename|move|mv).*{name}|{name}.*(rename|move)",
             files={f"{name}.py": "SETTINGS = {'lr': 0.1}\n"}, fatal=fatal)  # fmt: skip
    node = made.host()
    broken = "mkdir -p /tmp/stub/torch; printf '%s\\n' \"{}\" >/tmp/stub/torch/__init__.py"
    made.add("python: torch on PYTHONPATH is another one", "python", "torch shadowing", [node], r"PYTHONPATH|pip install",
         (node, broken.format("__version__ = '1.13.1'") + "; echo \"__version__ = '1.13.1'\" >/tmp/stub/torch/version.py"), spec=nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = made.host()
    made.add("python: torch cannot load its libraries", "python", "torch collective", [node], r"install|LD_LIBRARY_PATH|import torch",
         (node, broken.format("raise ImportError('libcudart.so.12: cannot open shared object file')")), spec=nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = made.host()
    made.add("python: a module of the standard library on PYTHONPATH", "python", "shadowing", [node], r"PYTHONPATH|rename|move",
         (node, "mkdir -p /tmp/stub; echo 'x = 1' >/tmp/stub/random.py"), spec=nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = made.host()
    made.add("python: sitecustomize exits", "python", "python-environment", [node], r"sitecustomize|PYTHONPATH",
         (node, "mkdir -p /tmp/stub; echo 'raise SystemExit(7)' >/tmp/stub/sitecustomize.py"), spec=nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    wrap = "mkdir -p /tmp/w; printf '#!/bin/sh\\n%s\\n' '{}' >/tmp/w/python3; chmod 755 /tmp/w/python3"

    def wrapped(name: str, checks: str, fix: str, body: str, *, fatal: bool = True, mode: str = "") -> None:
        node = made.host()
        made.add(
            name,
            "python",
            checks,
            [node],
            fix,
            (node, wrap.format(body) + mode),
            spec=nodes_with(node, python="/tmp/w/python3"),
            fatal=fatal,
        )

    wrapped(
        "python: no torch",
        "torch",
        r"install",
        'if [ "$1" = -I ]; then exec $PY "$@"; else exec $PY -S "$@"; fi'.replace("$PY", "@PYTHON@"),
    )
    wrapped(
        "python: prints before it starts",
        "shell-output",
        r"print|output|start-up",
        'echo loading modules; exec @PYTHON@ "$@"',
    )
    wrapped("python: hangs", "reach python", r".", "exec sleep 300")
    wrapped("python: ends at once", "python", r".", "exit 3")
    wrapped(
        "python: may not be run",
        "python",
        r"cluster\.python|install|chmod",
        "exit 0",
        mode="; chmod 644 /tmp/w/python3",
    )
    wrapped("python: an old one", "python", r"3\.8", 'echo "SyntaxError: invalid syntax" >&2; exit 1')
    node = made.host()
    made.add(
        "python: not at its path",
        "python",
        "python",
        [node],
        r"cluster\.python|install",
        spec=nodes_with(node, python="/opt/conda/bin/python9"),
    )
    for shift in (5, -40, 4000):
        node = made.host()
        text = f"import time; real = time.time; time.time = lambda: real() + {shift}"
        body = 'case "$1" in -I) shift 3; exec @PYTHON@ -I -S -c "import sys;sys.path.insert(0,\\"/tmp/w\\");import late;exec(sys.argv.pop(1))" "$@";; *) exec @PYTHON@ "$@";; esac'
        made.add(f"clock: {shift:+d} s", "limits", "clock", [node], r"ntp|chrony",
             (node, wrap.format(body) + f"; echo '{text}' >/tmp/w/late.py"), spec=nodes_with(node, python="/tmp/w/python3"), fatal=abs(shift) > 300)  # fmt: skip
