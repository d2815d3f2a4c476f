"""Measurement of one program: its weights on several divisions, and its bits after kills."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import forked
from tests.fault.styles.on_hosts import HostPair
from tests.verdicts import read_verdict

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent
LIMIT = 1e-9
"""Relative difference up to which weights in fp64 count as equal."""
SETTINGS = ("--train.log_every=1", "--train.snapshot.every_steps=2")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True, slots=True)
class Program:
    """Expectations of one program.

    Attributes:
        is_session: True if the program has a loop of its own.
        is_equal: True if several workers train what one process trains.
        note: sentence by which the product reports that they do not.
        has_verdict: False if the program makes its checkpoints without dtctl.
    """

    is_session: bool = False
    is_equal: bool = True
    note: str = ""
    has_verdict: bool = True


PROGRAMS = {
    "muon": Program(),
    "gan": Program(is_session=True),
    "actor": Program(is_session=True),
    "batch_norm": Program(is_equal=False, note="BatchNorm .* computes means over the samples of one worker"),
    "tbptt": Program(is_session=True),
    "tied": Program(),
    "byol": Program(),
    "contrastive": Program(),
    "stream": Program(),
    "packing": Program(),
    "own_checkpoints": Program(is_session=True, has_verdict=False),
    "plateau": Program(),
    "lora": Program(),
    "mixture": Program(),
}


def list_options(name: str, strategy: str) -> list[str]:
    """Return the arguments by which a program uses a strategy."""
    if PROGRAMS[name].is_session:
        return ["--fsdp"] if strategy == "fsdp" else []
    return [f"--train.strategy={strategy}"]


def train(name: str, folder: Path, workers: int, *options: str, kill: forked.Kill | None = None) -> forked.Ended:
    """Run a program to its end, or to a kill; the weights are in final.pt of the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    alone = ALONE if workers == 1 and PROGRAMS[name].is_session else {}
    environ = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **alone}
    return forked.launch([FOLDER / f"{name}.py", *SETTINGS, *options], workers, cwd=folder, environ=environ, kill=kill)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that a run has ended with."""
    weights: dict[str, torch.Tensor] = torch.load(folder / "final.pt")
    return weights


def measure_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor, as a part of its largest element."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(
        float((one[key].double() - other[key].double()).abs().max() / one[key].double().abs().max().clamp(min=1e-12))
        for key in one
    )


def count_code_lines(path: Path) -> int:
    """Return the number of lines with code, without docstrings, comments and blank lines."""
    tree = ast.parse(path.read_text())
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if isinstance(node, ast.stmt | ast.expr) and hasattr(node, "lineno"):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno != node.lineno:
                continue
            lines.add(node.lineno)
            lines.add(node.end_lineno or node.lineno)
    docstrings = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return len(lines - docstrings)


def kill_and_resume(
    name: str, folder: Path, options: list[str], calm: dict[str, torch.Tensor], size: int, kills: int, seed: int
) -> dict[str, Any]:
    """Kill a run on 2 workers at random moments, each time after more steps, and let the last attempt finish.

    Args:
        name: name of the program.
        folder: folder of the run.
        options: arguments of the program.
        calm: weights of a run without kills.
        size: bytes of the metrics of a run without kills, by which its progress is measured.
        kills: number of kills.
        seed: of the moments.
    """
    draws = random.Random(f"{name} {seed}")
    moments = sorted(draws.randrange(size // 4, size * 7 // 8) for _ in range(kills))
    done, verdicts, output = 0, [], ""
    for after in [*moments, None]:
        rank, delay_s = draws.randrange(2), draws.uniform(0, 0.005)
        kill = forked.Kill(
            rank=rank, progress=str(folder / "metrics.jsonl"), after=after, delay_s=delay_s
        ) if after is not None else None  # fmt: skip
        ended = train(name, folder, 2, *options, kill=kill)
        output += ended.output
        if "resumed at step" in ended.output:
            verdict = read_verdict(ended.output)
            is_cut_short = kill is not None and not re.search("^(not )?(exact|confirmed)", verdict)
            verdicts.append("killed before the verdict" if is_cut_short else verdict)
        if kill is not None and "killed" in ended.output.splitlines():
            done += 1
        elif ended.code:
            return {"kills": done, "verdicts": verdicts, "same_bits": False, "failed": ended.output[-1500:]}
        if ended.code == 0:
            break
    same = all(map(torch.equal, calm.values(), load_weights(folder).values()))
    return {"kills": done, "verdicts": verdicts, "same_bits": same}


def examine(name: str, folder: Path, *, kills: int, seed: int, hosts: HostPair | None) -> dict[str, Any]:
    """Return the row of a program.

    Args:
        name: name of the program.
        folder: an empty folder.
        kills: number of kills.
        seed: of the moments of the kills.
        hosts: two virtual hosts, for 2 x 2. None: 4 workers of one machine.
    """
    program = PROGRAMS[name]
    row: dict[str, Any] = {
        "program": name,
        "by": "session" if program.is_session and program.has_verdict else "Trainer" if program.has_verdict else "own",
        "lines": count_code_lines(FOLDER / f"{name}.py"),
    }
    one = train(name, folder / "one", 1)
    row["one"] = one.code == 0
    if one.code:
        return {**row, "good": False, "failed": one.output[-1500:]}
    alone = load_weights(folder / "one")
    differences: dict[str, float] = {}
    has_note = True
    for strategy in ("ddp", "fsdp"):
        if strategy == "fsdp" and not program.has_verdict:
            continue
        ended = train(name, folder / strategy, 2, *list_options(name, strategy))
        if ended.code:
            return {**row, "good": False, "failed": ended.output[-1500:]}
        differences[strategy] = measure_difference(alone, load_weights(folder / strategy))
        has_note &= bool(re.search(program.note, ended.output))
    if hosts is not None:
        row["four_by"] = "dtctl launch, 2 hosts x 2"
        hosts.train(name, folder / "four", list_options(name, "ddp"))
    else:
        row["four_by"] = "4 workers"
        ended = train(name, folder / "four", 4, *list_options(name, "ddp"))
        if ended.code:
            return {**row, "good": False, "failed": ended.output[-1500:]}
    differences["four"] = measure_difference(alone, load_weights(folder / "four"))
    row["differences"] = differences
    row["note"] = program.note and has_note
    size = (folder / "ddp" / "metrics.jsonl").stat().st_size
    calm = load_weights(folder / "ddp")
    row |= kill_and_resume(name, folder / "killed", list_options(name, "ddp"), calm, size, kills, seed)
    said = [verdict for verdict in row["verdicts"] if not verdict.startswith(("killed", "not confirmed: step"))]
    row["good"] = (
        (all(value <= LIMIT for value in differences.values()) or (not program.is_equal and has_note))
        and row["same_bits"]
        and row["kills"] == kills
        and all(verdict == "exact" for verdict in said)
        and bool(said) == program.has_verdict
    )
    return row
