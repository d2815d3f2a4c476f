"""Variables that differ, are misspelt, dangerous or dead."""

from __future__ import annotations

from tests.fault.grammar.fault import ALL, Collection, nodes_with


def add(made: Collection) -> None:
    for variable, value in (
        ("NCCL_BUFFSIZE", "8388608"),
        ("NCCL_PROTO", "Simple"),
        ("NCCL_NTHREADS", "256"),
        ("NCCL_MIN_CTAS", "4"),
        ("NCCL_IB_TC", "106"),
    ):
        node = made.host()
        made.add(
            f"variables: {variable} on one node",
            "variables",
            "env-differs",
            [node],
            variable,
            spec=nodes_with(node, env={variable: value}),
        )
    for variable, value, checks, fix in (
        ("NCCL_SOKET_IFNAME", "eth0", "env-unknown", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBUG", "VERBOSE", "env-unknown", "INFO|WARN"),
        ("NCCL_ALGO", "Ring", "env-dangerous", "unset"),
        ("NCCL_LL_THRESHOLD", "0", "env-dead", "unset"),
        ("OMP_NUM_THREADS", "abc", "env-unknown python-environment cpus", "OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS", "0", "env-unknown python-environment cpus", "OMP_NUM_THREADS"),
    ):
        made.add(
            f"variables: {variable}={value}",
            "variables",
            checks,
            ALL,
            fix,
            spec={"job.env": {variable: value}},
            fatal=False,
        )
