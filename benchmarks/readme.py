"""Puts the figures of the newest results into the README, between its marks, so that they are nowhere typed by hand.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def newest(name: str) -> dict[str, Any]:
    """The newest kept result of a benchmark."""
    path = max((ROOT / "benchmarks" / "results").glob(f"{name}-*.json"))
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return kept | {"file": path.relative_to(ROOT).as_posix()}


def launch() -> str:
    """Launch latency and pushes."""
    kept = newest("launch")
    rows = []
    for nodes in (16, 8):
        found = kept.get(f"true on {nodes} nodes", {})
        rows += [
            _row(f"`true` on {nodes} nodes", name, row, found["dtctl"])
            for name, row in found.items()
            if "median_s" in row and (nodes == 16 or name != "bare paramiko")
        ]
    for nodes in (4, 16):
        found = kept.get(f"push to {nodes} nodes", {})
        rows += [
            _row(
                f"5,000 files, 50 MB to {nodes} nodes, {name.split()[1]}", name.split()[0], row, found[f"dtctl {state}"]
            )
            for name, row in found.items()
            for state in (name.split()[1],)
        ]
    return (
        f"Fresh processes in turn, medians, {kept['date']}, all nodes on one machine of {kept['versions']['cores']} "
        f"cores ([{kept['file']}]({kept['file']})). dtctl's times hold imports, connections, the push of the code, "
        "the start and the count of what is left; the others only connect and run `true`. "
        f"The launcher takes {kept['client CPU ms per node']} ms of CPU time per node; "
        f"`dtctl --help` takes {kept['dtctl --help']['median_s']:.2f} s.\n\n"
        "| what | program | median | times dtctl's |\n|---|---|--:|--:|\n" + "\n".join(rows)
    )


def _row(what: str, program: str, row: dict[str, float], ours: dict[str, float]) -> str:
    return f"| {what} | {program} | {row['median_s']:.2f} s | {row['median_s'] / ours['median_s']:.2f} |"


def equality() -> str:
    """Every strategy beside one process: the largest difference of a parameter, from docs/equality.md."""
    lines = (ROOT / "docs" / "equality.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    head, *rows = [row for row in cells if len(row) > 5]
    # Gradients that travel in fewer bits are not meant to be equal.
    rows = [row for row in rows if float(row[head.index("limit")]) < 1e-3]
    at = {name: head.index(name) for name in ("workers", "strategy", "optimizer", "numbers", "parameters")}
    worst: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        found = worst.setdefault(row[at["strategy"]], {})
        key = (row[at["workers"]], row[at["optimizer"]] + " " + row[at["numbers"]])
        found[key] = max(found.get(key, 0.0), float(row[at["parameters"]]))
    columns = [(workers, kind) for workers in ("2", "4") for kind in ("sgd float64", "adamw float64")]
    told = ["| strategy | " + " | ".join(f"{kind}, {workers} workers" for workers, kind in columns) + " |"]
    told.append("|---|" + "--:|" * len(columns))
    for strategy, found in worst.items():
        told.append(f"| {strategy} | " + " | ".join(f"{found[c]:.0e}" if c in found else "" for c in columns) + " |")
    return "\n".join(told)


def newest_with(name: str, part: str) -> dict[str, Any] | None:
    """The newest kept result of a benchmark that has a part; parts may be measured apart, where a machine is shared."""
    for path in sorted((ROOT / "benchmarks" / "results").glob(f"{name}-*.json"), reverse=True):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if part in kept:
            return kept | {"file": path.relative_to(ROOT).as_posix()}
    return None


def loop() -> str:
    """What the training loop costs, as far as it was measured."""
    told = []
    if tiny := newest_with("loop", "tiny"):
        versions = tiny["versions"]
        told += [
            f"A step of a tiny model (8-32-1, 4 samples) beside a loop written by hand, which takes "
            f"{tiny['tiny']['bare']['us']:.0f} us; fresh processes in turn, torch {versions['torch']}, Lightning "
            f"{versions.get('lightning')}, accelerate {versions.get('accelerate')}, one thread "
            f"([{tiny['file']}]({tiny['file']})):",
            "",
            "| loop | step | added | ratio |",
            "|---|--:|--:|--:|",
            *(
                f"| {name} | {row['us']:.0f} us | {row['added_us']:+.0f} us | {row['ratio']:.2f} |"
                for name, row in tiny["tiny"].items()
                if not name.startswith("bare")
            ),
            "",
        ]
    if start := newest_with("loop", "start-up"):
        told.append(
            f"From the start of the process to the end of its first step: {start['start-up']['ratio']:.2f} times a "
            f"bare script ([{start['file']}]({start['file']}))."
        )
    if pair := newest_with("loop", "two workers"):
        share = pair["two workers"]["share"]
        told.append(
            f"Two workers of one thread reach {share['dtctl DDP']:.0%} of the throughput of two that have nothing "
            f"to do with each other, in the same run; torch's DDP by hand: {share['bare DDP']:.0%} "
            f"([{pair['file']}]({pair['file']}))."
        )
    return "\n".join(told)


def doctor() -> str:
    """How often the doctor is right, and how long it takes."""
    kept = newest("doctor-faults")
    rows = [row for row in kept["faults"].values() if row["doctor"]["status"] != "ok"]
    right = sum(row["doctor"]["right"] for row in rows)
    runs_well = sum(row["torchrun"]["says"].startswith("nothing") for row in rows)
    asked = sum(row["torchrun"]["says"] != "not asked" for row in rows)
    unseen = sum(row["ping and nc"]["says"] == "all is well" for row in rows)
    told = [
        f"Of {len(rows)} faults injected into virtual hosts it named check, nodes, primary cause and fix right in "
        f"{right}; pinging the head node and trying its port with nc found nothing wrong in {unseen}, and a small "
        f"torchrun job ran in {runs_well} of the {asked} it was asked of as if nothing were wrong "
        f"([{kept['file']}]({kept['file']}))."
    ]
    if soak := newest_with("doctor-soak", "soak"):
        parts = "; ".join(
            f"{row['clean']} of {row['runs']} runs {kind}, at a load of {row['load_average']:g}"
            for kind, row in soak["soak"].items()
        )
        told.append(
            f"On a healthy cluster of 3, with other work beside on {soak['versions']['cores']} cores, nothing was "
            f"found in {parts} ([{soak['file']}]({soak['file']}))."
        )
    if speed := newest_with("doctor-hosts", "hosts"):
        seconds = speed["hosts"]["seconds"]
        told.append(
            f"On {speed['hosts']['nodes']} virtual hosts `--quick` takes {seconds['quick beyond connections']:.1f} s "
            f"beyond the SSH connections, and every way of all {speed['hosts']['pairs']} pairs with its bandwidth "
            f"{seconds['full without torch']:.0f} s ([{speed['file']}]({speed['file']}))."
        )
    if cost := newest_with("doctor-simulated", "simulated"):
        rows = sorted((int(count), row) for count, row in cost["simulated"].items())
        quick = ", ".join(f"{row['quick']:.1f} s for {count}" for count, row in rows)
        full = ", ".join(f"{row['full']:.0f} s for {count}" for count, row in rows)
        told.append(
            f"With simulated nodes: `--quick` {quick}; in full {full}, linear in nodes "
            f"([{cost['file']}]({cost['file']}))."
        )
    return "\n".join(told)


def faults() -> str:
    """What kills, damage and saves come to."""
    told = []
    if soak := newest_with("soak", "three"):
        rows = [row for name in ("ddp", "fsdp", "three") for row in soak[name]["seeds"]]
        kills = [what for row in rows for what in row["killed"]]
        hosts, saves = (sum(what.startswith(word) for what in kills) for word in ("host", "save"))
        equal, left = sum(row["equal"] for row in rows), sum(row["left"] for row in rows)
        off = max(row["ledger_error"] for row in rows)
        told.append(
            f"Of {len(rows)} trainings on virtual hosts (ddp and fsdp on 2 x 2 workers, ddp on 3 x 1; dropout, "
            f"accumulation, processes that read data), killed {len(kills)} times at random, {hosts} times a whole host "
            f"and {saves} times while a snapshot was written, {equal} ended with the digest of one that was left "
            f"alone; {left} processes were left, and the ledger was off by at most {off:.1%} "
            f"([{soak['file']}]({soak['file']}))."
        )
    if zoo := newest_with("zoo", "draws"):
        rows = zoo["draws"]
        changed, kills = sum(bool(row["change"]) for row in rows), sum(len(row["kills"]) for row in rows)
        verdicts = zoo["verdicts"]
        told.append(
            f"Of {len(rows)} draws from {zoo['kinds']} models and loops under every strategy, killed {kills} times and "
            f"{changed} of them changed before they went on, {verdicts['equal']} said exact and ended with equal bits, "
            f"{verdicts['not exact, named']} said not exact and named what had changed, and "
            f"{verdicts['refused, named']} were refused for it; {zoo['false statements']} statements were false "
            f"([{zoo['file']}]({zoo['file']}))."
        )
    if damage := newest_with("damage", "programs"):
        flips = {name: row["flip"] for name, row in damage["programs"].items()}
        silent = ", ".join(f"{name} {row.get('SILENT', 0)}" for name, row in flips.items() if "dtctl" not in name)
        told.append(
            f"Of {damage['places']} flipped bytes dtctl noticed {flips['dtctl']['noticed']} and took the snapshot "
            f"before; loaded without a word: {silent} ([{damage['file']}]({damage['file']}))."
        )
    for part in ("dtctl, warm", "torchrun"):  # the second takes long: whoever is not recovered from waits for a minute
        if recovery := newest_with("recovery", part):
            rows = [
                f"{name} {row['median_s']:.2f} s, {row['recovered']} of {row['kills']}"
                for name, row in recovery.items()
                if isinstance(row, dict) and "median_s" in row
            ]
            bare = f"; two bare processes need {recovery['floor s']:.2f} s" if "floor s" in recovery else ""
            told.append(
                f"From `kill -9` of a worker to the next step of both, median, and how many were recovered from: "
                f"{'; '.join(rows)}{bare} ([{recovery['file']}]({recovery['file']}))."
            )
    return "\n".join(told)


BLOCKS: dict[str, Callable[[], str]] = {
    "figures": launch,
    "equality": equality,
    "loop": loop,
    "doctor": doctor,
    "faults": faults,
}


def filled(text: str) -> str:
    """A text with the figures between its marks."""
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}: benchmarks/readme.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main() -> None:
    """Rewrite the README."""
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
