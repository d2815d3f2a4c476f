"""Lets torch of all nodes add up numbers together, and finds whom it fails with: by what each says, else by bisection.

Made only where everything below holds: the nodes reach each other, and all have the same torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from dtctl.doctor.checks.bisect import bad_ones
from dtctl.doctor.findings import Finding
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.observe import Probes, Progress
from dtctl.plan import rendezvous

RAN = ("collective",)
STAGES = ("start", "store", "group", "sum", "done")
LOAD_LIMIT_S = 90.0
"""For `import torch`, which takes long on a cold file system, or when many nodes share one."""
TIMEOUT_S = {"gloo": 8.0, "nccl": 60.0}
"""Until a round has to end. The first context on each of eight GPUs takes half a minute without persistence mode."""
GRACE_S = 6.0
"""What torch may take beyond its own limit."""
SUSPECTS = ("GLOO_", "TORCH_", "NCCL_", "TP_", "OMP_", "MKL_", "USE_", "LD_")
"""Beginnings of variables without which a group that fails is tried again, before anything else is blamed."""
MAX_ROUNDS = 24
"""After these whoever has not been cleared is named."""


@dataclass(slots=True, kw_only=True)
class AllReduceResult:
    """What came of it."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """`backend`, `bytes`, `seconds` and `busbw_gb_s` of an all_reduce over all nodes."""
    uses: dict[str, list[str]] = field(default_factory=dict)
    """Node -> of the modules that something hides there, those that torch imports."""


class _Gang:
    """One worker per node, and rounds of some of them."""

    def __init__(
        self,
        probes: Probes,
        seen: Sequence[NodeReport],
        *,
        backend: str,
        python: Mapping[str, str],
        env: Mapping[str, Mapping[str, str]],
        progress: Progress,
    ) -> None:
        self._probes = probes
        self._python, self._env = python, env
        self._seen = {node.name: node for node in seen}
        self._backend = backend
        self._unset: list[str] = []
        self._progress = progress
        self.rounds = 0
        self.broken: set[str] = set()
        """Nodes whose worker was killed or has ended; they are started again before their next round."""

    def start(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Load torch on these nodes; the answers."""
        text = resources.files("dtctl.doctor").joinpath("worker.py").read_text(encoding="utf-8")
        messages = {
            name: {
                "op": "start",
                "python": self._python[name],
                "text": text,
                "hidden": self._hidden(name),
                "unset": self._unset,
                "env": dict(self._env[name]),
                "interface": self._interface(name),
                "limit_s": LOAD_LIMIT_S,
            }
            for name in names
        }
        return self._probes.ask(messages, limit_s=LOAD_LIMIT_S + GRACE_S, doing="loading torch")

    def _hidden(self, name: str) -> list[str]:
        return [row[0] for row in self._seen[name].facts["job"].get("shadows", ())]

    def _interface(self, name: str) -> str:
        ways = self._seen[name].facts["ways"]
        others = [node.address for node in self._seen.values() if node.name != name]
        return next((ways[address] for address in others if ways.get(address)), "")

    def variables(self) -> dict[str, dict[str, str]]:
        """Node -> variables that change what torch's collectives do, from the spec and the login."""
        return {
            name: {
                key: value
                for key, value in {**node.facts["env"], **self._env[name]}.items()
                if key.startswith(SUSPECTS) and key not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            }
            for name, node in self._seen.items()
        }

    def without(self, names: Iterable[str]) -> None:
        """Have the workers started anew, without these variables."""
        self._unset = list(names)
        self.broken |= {*self._seen}

    def used(self, name: str, said: Mapping[str, Any]) -> list[str]:
        """Of the hidden modules those that torch imports; all of them where torch could not be loaded."""
        return list(said["uses"]) if "uses" in said else self._hidden(name)

    def round(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """One all_reduce over these nodes; what each says."""
        again = [name for name in names if name in self.broken]
        if again:
            self.start(again)
            self.broken -= {*again}
        self.rounds += 1
        self._progress(f"adding up numbers with torch ({self._backend}) on {len(names)} nodes")
        port = rendezvous.port_candidates("doctor-sums", self.rounds, None)[0]
        asked = {
            "world": len(names),
            "address": self._seen[names[0]].data_address,
            "port": port,
            "backend": self._backend,
            "timeout_s": TIMEOUT_S[self._backend],
        }
        limit_s = TIMEOUT_S[self._backend] + GRACE_S
        messages = {
            name: {"op": "round", "ask": {**asked, "rank": rank}, "limit_s": limit_s} for rank, name in enumerate(names)
        }
        said = self._probes.ask(messages, limit_s=limit_s + GRACE_S, doing="waiting for torch")
        answers = {name: said.get(name, {"silent": True}) for name in names}
        self.broken |= {name for name, one in answers.items() if one.get("silent") or "complained" in one}
        return answers


def well(answers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether all have come to the end, and with the right sums."""
    return all(one.get("stage") == "done" and not one.get("wrong") for one in answers.values())


def culprits(answers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The nodes to blame, as far as their answers tell: wrong where others are right, silent, or behind; else none."""
    few = len(answers) / 2
    wrong = tuple(name for name, one in answers.items() if one.get("wrong"))
    silent = tuple(name for name, one in answers.items() if one.get("silent"))
    ended = tuple(name for name, one in answers.items() if "complained" in one and name not in silent)
    stages = {name: STAGES.index(one["stage"]) if one.get("stage") in STAGES else -1 for name, one in answers.items()}
    behind = tuple(name for name, stage in stages.items() if stage < max(stages.values()))
    for named in (wrong, ended, silent, behind):
        if 0 < len(named) <= few:
            return named
    return ()


def add_up(
    probes: Probes,
    seen: Sequence[NodeReport],
    *,
    python: Mapping[str, str],
    env: Mapping[str, Mapping[str, str]],
    progress: Progress,
) -> AllReduceResult:
    """Add up numbers on all nodes, with gloo, and with NCCL where all nodes have GPUs.

    Args:
        probes: the links to the nodes.
        seen: the nodes that are well, the head node first.
        python: node -> Python of the job there.
        env: node -> variables of the job there.
        progress: told what is going on.
    """
    done = AllReduceResult()
    for backend in ("gloo", "nccl") if all(node.facts["gpus"] for node in seen) else ("gloo",):
        gang = _Gang(probes, seen, backend=backend, python=python, env=env, progress=progress)
        names = [node.name for node in seen]
        loaded = gang.start(names)
        failed = {name: loaded.get(name, {}) for name in names if loaded.get(name, {}).get("stage") != "torch"}
        done.uses = {name: gang.used(name, loaded.get(name, {})) for name in names}
        if failed:
            done.findings.append(_no_torch(failed, gang.variables()))
            return done
        done.findings += other_nccl(
            {node.name: (node.facts["job"].get("nccl") or "", str(loaded[node.name].get("nccl", ""))) for node in seen}
        )
        if done.findings:
            return done
        answers = gang.round(names)
        if not well(answers):
            done.findings += _failed(gang, names, answers, backend)
            return done
        seconds = max(float(one["seconds"]) for one in answers.values())
        size = int(answers[names[0]]["bytes"])
        bus = size / seconds / 1e9 * 2 * (len(names) - 1) / len(names)
        done.figures = {"backend": backend, "bytes": size, "seconds": seconds, "busbw_gb_s": round(bus, 4)}
    return done


def other_nccl(versions: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Nodes on which torch has loaded another NCCL than its wheel brought.

    Args:
        versions: node -> version of the wheel, version that was loaded; empty where there is none.
    """
    other = {node: said for node, said in versions.items() if all(said) and not _same(*said)}
    if other:
        yield Finding(
            check="nccl",
            status="fail" if len(other) < len(versions) else "warn",
            nodes=tuple(other),
            summary=f"{', '.join(other)}: torch has loaded another NCCL than the one that was installed with it",
            fix="take the other libnccl out of LD_LIBRARY_PATH and LD_PRELOAD: find it with ldconfig -p | grep nccl",
            evidence=tuple(f"{node}: installed {wheel}, loaded {loaded}" for node, (wheel, loaded) in other.items()),
        )


def _same(wheel: str, loaded: str) -> bool:
    return wheel.split(".")[:3] == loaded.split(".")[:3]


def _no_torch(failed: Mapping[str, Mapping[str, Any]], variables: Mapping[str, Mapping[str, str]]) -> Finding:
    told = {name: _said(one) for name, one in failed.items()}
    # A message that names a variable which is set there says what is to go.
    named = dict.fromkeys(key for name, text in told.items() for key in variables[name] if key in text)
    return Finding(
        check="collective",
        status="fail",
        nodes=tuple(failed),
        summary=f"{', '.join(failed)}: torch cannot be loaded: {next(iter(told.values()))}",
        fix=f"take {', '.join(named)} out of job.env, cluster.nodes[].env and the login, or set it as the message says"
        if named
        else "try `python -c 'import torch'` there with the job's Python (cluster.python), and install torch again",
        evidence=tuple(f"{name}: {text}" for name, text in told.items()),
    )


def _failed(
    gang: _Gang, names: Sequence[str], answers: Mapping[str, Mapping[str, Any]], backend: str
) -> Iterator[Finding]:
    set_there = gang.variables()
    suspects = list(dict.fromkeys(name for variables in set_there.values() for name in variables))
    if suspects:
        gang.without(suspects)
        if well(gang.round(names)):
            yield _by_variables(names, answers, backend, set_there)
            return
        gang.without(())
    nodes, how = culprits(answers), "by what the nodes say"
    if not nodes:

        def works(group: Sequence[str]) -> bool:
            return gang.rounds >= MAX_ROUNDS or well(gang.round(group))

        nodes, how = tuple(bad_ones(names, works)), f"by bisection, in {gang.rounds} rounds"
    wrong = any(one.get("wrong") for one in answers.values())
    what = "gives wrong sums" if wrong else "does not come to its end"
    yield Finding(
        check="collective",
        status="fail",
        nodes=nodes,
        peers=tuple(name for name in names if name not in nodes),
        summary=f"an all_reduce over {len(names)} nodes ({backend}) {what}; {', '.join(nodes)} found {how}",
        fix=f"leave {', '.join(nodes)} out (cluster.nodes) and have memory, processors and network card tested there"
        if wrong
        else f"on {', '.join(nodes)}: compare torch's build and the job's variables with the others' (dtctl nccl env), "
        f"then dtctl launch with TORCH_DISTRIBUTED_DEBUG=DETAIL",
        evidence=tuple(f"{name}: {_told(one, backend)}" for name, one in list(answers.items())[:8]),
    )


def _by_variables(
    names: Sequence[str],
    answers: Mapping[str, Mapping[str, Any]],
    backend: str,
    set_there: Mapping[str, Mapping[str, str]],
) -> Finding:
    who = tuple(name for name in names if set_there.get(name))
    told = dict.fromkeys(f"{key}={value}" for variables in set_there.values() for key, value in variables.items())
    keys = dict.fromkeys(text.partition("=")[0] for text in told)
    return Finding(
        check="collective",
        status="fail",
        nodes=who,
        summary=f"an all_reduce over {len(names)} nodes ({backend}) fails with {', '.join(told)}, and works without",
        fix=f"take {', '.join(keys)} out of job.env, cluster.nodes[].env and the login"
        + (", one after the other" if len(keys) > 1 else ""),
        evidence=tuple(f"{name}: {_told(one, backend)}" for name, one in list(answers.items())[:8]),
    )


def _told(one: Mapping[str, Any], backend: str) -> str:
    if one.get("wrong"):
        return f"{one['wrong']} numbers are wrong"
    stage = f"reached stage {one.get('stage', 'none')!r}"
    return (
        f"{stage}, then nothing for {TIMEOUT_S[backend] + GRACE_S:g} s"
        if one.get("silent")
        else f"{stage}; {_said(one)}"
    )


def _said(one: Mapping[str, Any]) -> str:
    return str(one.get("complained") or one.get("error") or "it says nothing more")
