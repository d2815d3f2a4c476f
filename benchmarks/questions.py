"""What the kept results answer: one question each, with the bars of its plot, its conditions, and what was missed.

The pages under "Benchmarks" (docs/generate.py), the plots (benchmarks/plot.py) and the README's figures
(benchmarks/readme.py) are made from this, and this is made from the newest files in benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Bar:
    """One program, or one half of a corpus, and its figure."""

    name: str
    value: float
    remark: str = ""

    @property
    def ours(self) -> bool:
        """Whether this is dtctl's."""
        return self.name.startswith("dtctl")


@dataclass(frozen=True)
class Chart:
    """Bars that may be compared: the same thing, measured in the same run or under the same conditions."""

    name: str
    title: str
    unit: str
    bars: tuple[Bar, ...]
    more_is_better: bool = False
    digits: int = 2
    plotted: bool = True

    def sorted(self) -> list[Bar]:
        """The best first."""
        return sorted(self.bars, key=lambda bar: -bar.value if self.more_is_better else bar.value)


@dataclass(frozen=True)
class Answer:
    """One page."""

    slug: str
    question: str
    answer: str
    """The figure in a sentence."""
    charts: tuple[Chart, ...]
    conditions: str
    command: str
    files: tuple[str, ...]
    measures: tuple[str, ...]
    """Files and folders of the code whose speed or judgement it is."""
    missed: tuple[str, ...] = field(default=())
    """What was aimed at and not reached, and what the comparison does not show."""


LAUNCH_FILES = ("dtctl/launch", "dtctl/supervisor", "dtctl/transport", "dtctl/plan", "dtctl/cli/launch.py")


def newest(name: str, part: str = "", *programs: str) -> dict[str, Any]:
    """Return the newest kept result of a benchmark that has a part, and in it the figures of some programs.

    Parts may be measured apart, where a machine is shared, and a program may not be installed.

    Raises:
        LookupError: There is none.
    """
    for path in sorted(RESULTS.glob(f"{name}-????????-????.json"), reverse=True):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not part or (part in kept and all("median_s" in kept[part].get(program, {}) for program in programs)):
            return kept | {"file": f"benchmarks/results/{path.name}"}
    raise LookupError(f"no result of {name} has {part or 'anything'}")


def _programs(rows: dict[str, Any], key: str, remark: Callable[[dict[str, Any]], str] = lambda _: "") -> Iterator[Bar]:
    for name, row in rows.items():
        if isinstance(row, dict) and key in row:
            yield Bar(name, float(row[key]), remark(row))


def recovery() -> Answer:
    """A killed worker."""
    forked, whole = newest("recovery", "dtctl, warm"), newest("recovery", "torchrun")

    def recovered(row: dict[str, Any]) -> str:
        return f"{row['recovered']} of {row['kills']} recovered"

    bars = (*_programs(forked, "median_s", recovered), *_programs(whole, "median_s", recovered))
    warm = next(bar for bar in bars if bar.name == "dtctl, warm")
    torchrun = next(bar for bar in bars if bar.name == "torchrun")
    bars = tuple(Bar("dtctl, kind direct" if bar is warm else bar.name, bar.value, bar.remark) for bar in bars)
    return Answer(
        "recovery",
        "How long does a killed worker cost?",
        f"{warm.value:.2f} s from `kill -9` to the next step of all workers; torchrun needs {torchrun.value:.1f} s and "
        f"recovered from {torchrun.remark.removesuffix(' recovered')} kills.",
        (Chart("recovery", "from kill -9 of a worker to the next step of all", "seconds, median", bars),),
        "Two workers on one machine of 2 cores, DDP over gloo, a small model, without loading a snapshot (that comes on top "
        f"everywhere alike). Two bare processes need {forked['floor s']:.2f} s to start, which is why workers are forked from a "
        "process that has torch already (`dtctl, kind direct`). `cold` is the same without that process.",
        "python benchmarks/recovery.py",
        (forked["file"], whole["file"]),
        ("dtctl/supervisor", "dtctl/launch/control", "dtctl/runtime/live", "dtctl/transport"),
        (
            "The two files were measured apart, and torchrun with 10 kills only: each that it does not recover from takes a minute.",
        ),
    )


def step() -> Answer:
    """The loop's own cost."""
    tiny, small, start = newest("loop", "tiny"), newest("loop", "small"), newest("loop", "start-up")
    pair, elastic = newest("loop", "two workers"), newest("loop", "elastic")
    versions = ", ".join(
        f"{name} {tiny['versions'][name]}" for name in ("torch", "lightning", "accelerate") if name in tiny["versions"]
    )

    def bars(rows: dict[str, Any]) -> tuple[Bar, ...]:
        own = (name for name in rows if name != "bare (peers)")
        return tuple(
            Bar("written by hand" if name == "bare" else name, rows[name]["us"], f"{rows[name]['ratio']:.2f}x")
            for name in own
        )

    ratio = tiny["tiny"]["dtctl"]["ratio"]
    share = pair["two workers"]["share"]
    return Answer(
        "step",
        "What does the training loop cost per step?",
        f"{tiny['tiny']['dtctl']['added_us']:.0f} us beside a loop written by hand, {ratio:.2f} times its step on a model so small "
        "that there is nothing else to measure.",
        (
            Chart(
                "step-tiny",
                "a step of a tiny model (8-32-1, 4 samples)",
                "microseconds, median",
                bars(tiny["tiny"]),
                digits=0,
            ),
            Chart("step-small", "a step of a small model", "microseconds, median", bars(small["small"]), digits=0),
        ),
        f"Fresh processes in turn, one thread, {versions}. From the start of the process to the end of its first step: {start['start-up']['ratio']:.2f} times "
        f"a bare script. Two workers reach {share['dtctl DDP']:.0%} of the throughput of two that have nothing to do with each "
        f"other, torch's DDP by hand {share['bare DDP']:.0%}. `train.exact: elastic` takes {elastic['elastic']['ratio']:.2f} "
        "times a step of DDP.",
        "python benchmarks/loop.py",
        tuple(kept["file"] for kept in (tiny, small, start, pair, elastic)),
        (
            "dtctl/runtime/loop.py",
            "dtctl/runtime/engine.py",
            "dtctl/runtime/step.py",
            "dtctl/runtime/data_loading",
            "dtctl/runtime/strategies",
        ),
    )


def start() -> Answer:
    """Launch latency."""
    kept = newest("launch", "true on 16 nodes")
    wide = kept["true on 16 nodes"]
    return Answer(
        "launch",
        "How fast does a launch start?",
        f"`true` on 16 nodes: {wide['dtctl']['median_s']:.2f} s, of which bare SSH connections take "
        f"{wide['bare paramiko']['median_s']:.2f} s.",
        (
            Chart(
                "launch-16",
                "`true` on 16 nodes beside what only runs commands",
                "seconds, median",
                tuple(_programs(wide, "median_s")),
            ),
        ),
        f"Fresh processes in turn, {kept['date']}, all nodes on one machine of {kept['versions']['cores']} cores. dtctl's times hold "
        "imports, connections, the push of the code, the start and the count of what is left; pdsh, clush, parallel-ssh and "
        f"bare paramiko only connect and run `true`. The launcher takes {kept['client CPU ms per node']} ms of processor time per node.",
        "python benchmarks/launch.py",
        (kept["file"],),
        LAUNCH_FILES,
    )


def launchers() -> Answer:
    """Launch latency beside programs that launch jobs."""
    kept = newest("launch", "true on 8 nodes", "deepspeed", "torchrunx")
    rows = kept["true on 8 nodes"]
    return Answer(
        "launchers",
        "How fast are other launchers of jobs?",
        f"`true` on 8 nodes: dtctl {rows['dtctl']['median_s']:.2f} s, deepspeed {rows['deepspeed']['median_s']:.1f} s, torchrunx "
        f"{rows['torchrunx']['median_s']:.1f} s.",
        (
            Chart(
                "launch-8",
                "`true` on 8 nodes by launchers of jobs",
                "seconds, median",
                tuple(_programs(rows, "median_s")),
            ),
        ),
        f"Fresh processes in turn, {kept['date']}, all nodes on one machine of {kept['versions']['cores']} cores.",
        "python benchmarks/launch.py",
        (kept["file"],),
        LAUNCH_FILES,
    )


def push() -> Answer:
    """Files to nodes."""
    kept = newest("launch", "push to 16 nodes")
    charts = []
    for nodes in (4, 16):
        for state in ("fresh", "unchanged"):
            rows = {
                name.split()[0]: row for name, row in kept[f"push to {nodes} nodes"].items() if name.endswith(state)
            }
            title = f"5,000 files, 50 MB to {nodes} nodes, {state}"
            charts.append(Chart(f"push-{nodes}-{state}", title, "seconds, median", tuple(_programs(rows, "median_s"))))
    return Answer(
        "push",
        "How long does the code take to the nodes?",
        f"As long as rsync where files are new, which is what the disks of 16 hosts on one machine allow; "
        f"{kept['push to 16 nodes']['dtctl unchanged']['median_s']:.1f} s where nothing has changed, with the launch around it.",
        tuple(charts),
        "dtctl's figures are whole launches: connections, scan, push, digest of every file on every node, start, end.",
        "python benchmarks/launch.py",
        (kept["file"],),
        ("dtctl/launch/files", "dtctl/supervisor/receive.py", "dtctl/transport"),
        ("Where nothing has changed rsync takes 0.5 to 0.7 of the time: it starts no job.",),
    )


def damage() -> Answer:
    """Flipped bytes."""
    kept = newest("damage", "programs")
    rows = {name: row["flip"].get("SILENT", 0) for name, row in kept["programs"].items()}
    return Answer(
        "damage",
        "Is a damaged snapshot noticed?",
        f"Of {kept['places']} flipped bytes dtctl noticed {kept['places'] - rows['dtctl']} and took the snapshot before.",
        (
            Chart(
                "damage",
                "snapshots with one flipped byte that were loaded without a word",
                f"of {kept['places']}",
                tuple(Bar(n, v) for n, v in rows.items()),
                digits=0,
            ),
        ),
        f"One byte of a snapshot of the same model is flipped, {kept['places']} places drawn at random, each loaded in the way of the "
        f"program's own documentation; torch {kept['torch']}.",
        "python benchmarks/damage.py",
        (kept["file"],),
        (
            "dtctl/runtime/snapshot/format",
            "dtctl/runtime/snapshot/storage",
            "dtctl/runtime/snapshot/load.py",
            "dtctl/runtime/snapshot/read.py",
        ),
    )


def resume() -> Answer:
    """Bits after a kill."""
    kept = newest("resume")
    rows = {name: row["dropout"]["0.2"] for name, row in kept.items() if isinstance(row, dict) and "dropout" in row}
    equal = [name for name, row in rows.items() if row["resumed"]]
    bars = tuple(
        Bar(name, float(row["resumed"]), "the same bits" if row["resumed"] else "other bits")
        for name, row in rows.items()
    )
    return Answer(
        "resume",
        "Does a resumed training end with the same bits?",
        f"With dropout: {', '.join(equal)} only.",
        (
            Chart(
                "resume",
                "killed, resumed, and ended with the bits of a run left alone",
                "1: yes",
                bars,
                more_is_better=True,
                digits=0,
                plotted=False,
            ),
        ),
        f"Killed in step {kept['killed_in_step']}, the newest snapshot after step {kept['saved_after']}, dropout 0.2, shuffled data; "
        "each program as its documentation says.",
        "python benchmarks/resume.py",
        (kept["file"],),
        ("dtctl/runtime",),
    )


def snapshots() -> Answer:
    """Stall and time of a save."""
    kept = newest("snapshot", "128 MiB")
    charts = []
    for size in ("128 MiB", "1024 MiB"):
        if size not in kept:
            continue
        for part, title in (
            ("stall", "training stands still"),
            ("whole", "until the snapshot is on disk"),
            ("load", "loading it"),
        ):
            bars = tuple(Bar(name, 1000 * median(seconds)) for name, seconds in kept[size]["seconds"][part].items())
            charts.append(Chart(f"snapshot-{size.split()[0]}-{part}", f"{size}: {title}", "ms, median", bars, digits=0))
    bars = {
        f"{size}, {name}": row
        for size in ("128 MiB", "1024 MiB")
        for name, row in kept.get(size, {}).get("bars", {}).items()
    }
    stall = kept["128 MiB"]["bars"]["stall: dtctl / dcp.async_save"]["ratio"]
    return Answer(
        "snapshots",
        "How long does a snapshot stop the training?",
        f"About as long as a bare copy of the memory, and {stall:.2f} of what torch's own asynchronous save needs, for 128 MiB.",
        tuple(charts),
        f"torch {kept['torch']}, {kept['machine']}, one process, otherwise idle.",
        "python benchmarks/snapshot.py",
        (kept["file"],),
        ("dtctl/runtime/snapshot",),
        tuple(f"{name}: {row['ratio']:.2f}, aimed at {row['bar']:g}." for name, row in bars.items() if not row["met"]),
    )


def faults() -> Answer:
    """The doctor on faults."""
    first, second = newest("doctor-grammar"), newest("doctor-second-grammar")
    parts = {"first collection": first["held"], "second collection": second["second-held"]}
    words = {"right": "right", "partly": "partly right", "missed": "missed", "wrong": "wrong"}
    charts = [
        Chart(
            f"doctor-{n}",
            f"{name}: of {part['examined']} unseen faults",
            "faults",
            tuple(Bar(words[key], float(part.get(key, 0))) for key in words),
            more_is_better=True,
            digits=0,
        )
        for n, (name, part) in enumerate(parts.items(), 1)
    ]
    missed = [
        f"{name}: {row['verdict']}"
        for part in parts.values()
        for name, row in part["faults"].items()
        if row["verdict"] in ("missed", "wrong")
    ]
    right, examined = (sum(part[key] for part in parts.values()) for key in ("right", "examined"))
    healthy = sum(kept["healthy"]["runs"] for kept in (first, second))
    alarms = sum(kept["healthy"]["false alarms"] for kept in (first, second))
    return Answer(
        "doctor",
        "How often is the doctor right?",
        f"Right check, node and fix for {right} of {examined} faults that it had not seen; {alarms} false alarms in {healthy} runs on "
        "healthy nodes of a loaded machine.",
        tuple(charts),
        "Faults drawn from a grammar of layers, places, directions and times, injected into virtual hosts; each collection split in two before "
        "anything ran, one half learned from, the other scored once. `docs/accuracy-doctor.md` has all figures.",
        "python benchmarks/doctor_faults.py --grammar",
        (first["file"], second["file"]),
        ("dtctl/doctor/checks", "dtctl/supervisor/probe", "dtctl/doctor/examine.py", "dtctl/doctor/rounds.py"),
        (
            *missed,
            *(
                f"{name}: {part['can_train']} time it said that nodes can train which could not."
                for name, part in parts.items()
                if part["can_train"]
            ),
        ),
    )


def logs() -> Answer:
    """Logs of failed jobs."""
    first = json.loads(min(RESULTS.glob("logs-????????-????.json")).read_text(encoding="utf-8"))["held"]
    kept, pieces = newest("logs", "held_first"), newest("logs-pieces", "held_first")
    whole = newest("logs-third", "held_first")
    second, third, quoted = kept["held_first"], whole["held_first"], pieces["held_first"]

    def shares(part: dict[str, Any]) -> tuple[Bar, ...]:
        named = {
            "cause": ("right", "cases"),
            "node or rank, where told": ("who_right", "who_told"),
            "healthy logs silent": ("silent", "healthy"),
        }
        return tuple(
            Bar(name, 100 * part[good] / part[of], f"{part[good]} of {part[of]}") for name, (good, of) in named.items()
        )

    return Answer(
        "logs",
        "How often are the logs of a failed job explained rightly?",
        f"The cause in {second['right'] + third['right']} of {second['cases'] + third['cases']} public failures that it had not seen.",
        (
            Chart(
                "logs-2",
                "second collection, unseen: from public issues, CI and tutorials",
                "percent right",
                shares(second),
                more_is_better=True,
                digits=0,
            ),
            Chart(
                "logs-4",
                "third collection, unseen: whole files that people have committed",
                "percent right",
                shares(third),
                more_is_better=True,
                digits=0,
            ),
            Chart(
                "logs-3",
                "pieces, unseen: as people quote them",
                "percent right",
                shares(quoted),
                more_is_better=True,
                digits=0,
            ),
            Chart(
                "logs-1",
                "first collection, unseen: from public issues",
                "percent right",
                shares(first),
                more_is_better=True,
                digits=0,
            ),
        ),
        "Texts whose cause was established where they were found; each collection split in two before reading, one half learned from. The "
        "texts of the first are shortened; the pieces are a few lines each, some of their causes were inferred, and no half of them was learned from.",
        "python benchmarks/logs.py",
        (kept["file"], whole["file"], pieces["file"]),
        ("dtctl/doctor/explain",),
        (
            f"Wrong with confidence: {first['wrong_with_confidence']} of {first['cases']}, then {second['wrong_with_confidence']} of "
            f"{second['cases']}, {third['wrong_with_confidence']} of {third['cases']}, and {quoted['wrong_with_confidence']} of {quoted['cases']} pieces (aimed at 3%). Aimed at: 85% of causes, 90% of nodes and ranks, all healthy logs silent.",
        ),
    )


def linter() -> Answer:
    """Mistakes in training code."""
    first = next(
        json.loads(path.read_text(encoding="utf-8")) | {"file": f"benchmarks/results/{path.name}"}
        for path in sorted(RESULTS.glob("lint-corpus-????????-????.json"))
        if json.loads(path.read_text(encoding="utf-8"))["note"] == "the held half as first seen"
    )
    second = newest("lint-corpus", "held_first")
    parts = {"newest collection": second["held_first"], "first collection": first["held"]}
    charts = [
        Chart(
            f"lint-{n}",
            f"{name}: {part['mistakes']} mistakes in {part['files']} unseen files of {part['repositories']} repositories",
            "percent found",
            (
                Bar("of those that a rule is about", 100 * part["recall_with_rule"]),
                Bar("of all", 100 * part["recall_all"]),
            ),
            more_is_better=True,
            digits=0,
        )
        for n, (name, part) in enumerate(parts.items(), 1)
    ]
    return Answer(
        "lint",
        "How many mistakes does the linter find?",
        f"{second['held_first']['recall_all']:.0%} of those that people wrote down in files that it had not seen.",
        tuple(charts),
        "Files of public repositories, each read and its mistakes written down before the tool ran; split in two, one half learned from.",
        "python benchmarks/lint_corpus.py",
        (first["file"], second["file"]),
        ("dtctl/lint",),
        ("Aimed at 75% of mistakes that a rule is about and 60% of all. `docs/accuracy-lint.md` lists every one.",),
    )


def experts() -> Answer:
    """What mixtures of experts gain, and what a layer of them costs."""
    gain = newest("experts", "gain")
    rows = {name: [seed[-1]["val_loss"] for seed in gain["gain"][name]] for name in ("experts", "dense")}
    middle = {name: median(losses) for name, losses in rows.items()}
    names = {"experts": "dtctl, 2 of 8 experts", "dense": "dense, as much computation for a byte"}
    longer = newest("experts", "longer")
    last = {name: [seed[-1]["val_loss"] for seed in longer["longer"][name]] for name in names}
    seeds = len(last["dense"])
    charts = [
        Chart(
            "experts-gain",
            f"loss on validation text after {gain['gain']['dense'][0][-1]['step']} steps",
            f"nats per byte, median of {len(rows['dense'])} seeds",
            tuple(Bar(names[name], middle[name], f"{min(rows[name]):.3f} to {max(rows[name]):.3f}") for name in names),
            digits=3,
            plotted=False,
        ),
        Chart(
            "experts-longer",
            f"loss on validation text after {longer['longer']['dense'][0][-1]['step']:,} steps",
            f"nats per byte, median of {seeds} seeds",
            tuple(
                Bar(names[name], median(last[name]), f"{min(last[name]):.3f} to {max(last[name]):.3f}")
                for name in names
            ),
            digits=3,
            plotted=False,
        ),
    ]
    files, timed = [gain["file"], longer["file"]], _timed_layers()
    for kept, chart in timed:
        charts.append(chart)
        files += [kept] if kept not in files else []
    return Answer(
        "experts",
        "What do experts gain, and what does a layer of them cost?",
        f"A small mixture ends at {middle['experts']:.3f}, the dense model with as much computation at {middle['dense']:.3f}.",
        tuple(charts),
        "examples/moe in one process, both models with the same data, steps and learning rate; losses do not depend on "
        "what else the machine does. Layers are timed in turn, in fp32, a forward and a backward pass of one thread per worker, "
        "after a comparison of outputs and gradients; torchtitan is v0.2.2 (73a0e69) with its loop over experts, its kernel in triton "
        "replaced by its own for CPUs.",
        "python benchmarks/experts.py --torchtitan DIR",
        tuple(files),
        ("dtctl/runtime/moe",),
        () if timed else ("What a layer costs has not been timed on an idle machine yet.",),
    )


def _timed_layers() -> list[tuple[str, Chart]]:
    """Charts of what layers of experts cost, each with the file of its figures; none where nothing was timed yet."""
    charts = []
    for part, where in (("layer", "one process"), ("workers", "two workers that divide the experts")):
        try:
            kept = newest("experts", part)
        except LookupError:
            continue
        for shape, rows in kept[part].items():
            bars = (Bar(name, row["ns_per_token"] / 1000) for name, row in rows.items())
            title = f"a {shape} layer, {where}"
            chart = Chart(f"experts-{part}-{shape}", title, "microseconds per token", tuple(bars), plotted=False)
            charts.append((kept["file"], chart))
    return charts


ANSWERS: tuple[Callable[[], Answer], ...] = (
    recovery,
    step,
    start,
    launchers,
    push,
    snapshots,
    damage,
    resume,
    experts,
    faults,
    logs,
    linter,
)


def answers() -> list[Answer]:
    """Every question that kept results answer."""
    return [make() for make in ANSWERS]
