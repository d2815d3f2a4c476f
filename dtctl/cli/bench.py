"""`dtctl bench`: measure the communication of the nodes through torch, and check its results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dtctl import names
from dtctl.bench.figures import DEFAULT_SIZES, OPS
from dtctl.cli import output
from dtctl.cli.common.agreement import Settings, Yes, require_spec_agreement
from dtctl.printable import format_count

if TYPE_CHECKING:
    from dtctl.bench.job import BenchmarkRequest, BenchmarkResults
    from dtctl.spec.model import Spec

HEADER = ["OPERATION", "SIZE", "TIME us", "ALGBW GB/s", "BUSBW GB/s", "WRONG"]
WIDTHS = (15, 10, 11, 11, 11, 6)


def bench(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help=f"The spec.  [default: {names.SPEC_FILE}]", show_default=False)
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="NAME", help=f"Only this one: {', '.join(OPS)}.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="A:B", help="Smallest and largest message; each size is four times the previous one.")
    ] = DEFAULT_SIZES,
    backend: Annotated[
        Literal["auto", "gloo", "nccl"], typer.Option(help="auto: nccl with GPUs, gloo without.")
    ] = "auto",
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of timed calls per operation.")] = 20,
    training: Annotated[
        bool,
        typer.Option("--training", help="Also time a training step on 1, 2, 4 ... workers and show its efficiency."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Plot the results into this file.")] = None,
    set_: Settings = None,
    yes: Yes = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Measure collectives over the nodes of a spec, check every result, and show each pair's bandwidth.

    Time is that of the slowest worker; the bandwidths are those of nccl-tests.
    """
    from dtctl.bench.figures import parse_operations, parse_size_range
    from dtctl.bench.job import BenchmarkRequest
    from dtctl.spec.load import load_spec

    request = BenchmarkRequest(
        ops=parse_operations(op or ()),
        sizes=parse_size_range(sizes),
        backend=backend,
        repeats=repeats,
        training=training,
    )
    checked = load_spec(spec or Path(names.SPEC_FILE), tuple(set_ or ()))
    require_spec_agreement(checked, yes=yes)
    return measure_and_show(checked, request, plot=plot, json_lines=json_)


def measure_and_show(spec: Spec, request: BenchmarkRequest, *, plot: Path | None, json_lines: bool) -> int:
    """Run the benchmark and print its figures; return the exit code."""
    from dtctl.bench.job import run_benchmark
    from dtctl.bench.picture import render_bench_svg
    from dtctl.cli.common.doctor_view import show_cause
    from dtctl.cli.common.followed_run import catch_stop_signals, print_run_end
    from dtctl.errors import WorkerFailed

    if not json_lines:
        output.print_stdout(_format_result_line(HEADER), "bold")
    # If a run fails, the logs in this folder have torch's messages, which explain missing figures.
    with tempfile.TemporaryDirectory(prefix="dtctl-bench-") as name, catch_stop_signals() as signals:
        on_row = _show_nothing if json_lines else _show_row
        figures, ended, owners = run_benchmark(spec, request, Path(name), on_row=on_row, signals=signals)
        if ended.exit_code or not figures.finished:
            print_run_end(ended)
            show_cause(Path(name))
            return ended.exit_code or WorkerFailed.exit_code
    facts = build_bench_json(figures, owners)
    if plot is not None:
        plot.write_text(render_bench_svg(facts), encoding="utf-8")
        output.print_stderr(f"wrote {plot}")
    if json_lines:
        output.emit_json(facts)
    else:
        print_pairs_and_training(figures, owners)
    if figures.wrong:
        output.print_stderr(f"{figures.wrong} results are wrong: the data received is not the data sent", "red", "bold")
        return WorkerFailed.exit_code
    return 0


def build_bench_json(figures: BenchmarkResults, owners: tuple[str, ...]) -> dict[str, Any]:
    """Return the figures as a JSON object; its key `ranks` has the node of each rank."""
    from dtctl.bench.conclusions import build_conclusions

    return {
        "ok": figures.wrong == 0,
        "backend": figures.backend,
        "torch": figures.torch,
        "world_size": figures.world,
        "ranks": list(owners),
        "results": figures.results,
        "pairs": figures.pairs,
        "training": figures.training,
        "conclusions": build_conclusions(figures.pairs, figures.training, owners),
    }


def _format_result_line(cells: list[str]) -> str:
    numbers = (cell.rjust(width) for cell, width in zip(cells[1:], WIDTHS[1:], strict=True))
    return "  ".join([cells[0].ljust(WIDTHS[0]), *numbers])


def _show_nothing(_: dict[str, Any]) -> None:
    return


def _show_row(row: dict[str, Any]) -> None:
    from dtctl.bench.figures import format_message_size

    rates = [f"{row['algbw_gb_s']:.3f}", f"{row['busbw_gb_s']:.3f}"]
    cells = [row["op"], format_message_size(row["size"]), f"{row['time_us']:.1f}", *rates, str(row["wrong"])]
    output.print_stdout(_format_result_line(cells), *(("red",) if row["wrong"] else ()))


def print_pairs_and_training(figures: BenchmarkResults, owners: tuple[str, ...]) -> None:
    """Print the bandwidths of the pairs, the training steps, and the conclusions from both."""
    from dtctl.bench.conclusions import build_conclusions
    from dtctl.bench.figures import format_message_size

    if figures.pairs:
        output.print_stdout(
            f"\nGB/s from (row) to (column), messages of {format_message_size(figures.pairs['size'])}", "bold"
        )
        labels = [f"{rank} {owners[rank]}" if rank < len(owners) else str(rank) for rank in range(figures.world)]
        rows = [
            [label, *("" if rate is None else f"{rate:.3f}" for rate in rates)]
            for label, rates in zip(labels, figures.pairs["gb_s"], strict=True)
        ]
        output.print_table(rows, header=["FROM \\ TO", *(str(rank) for rank in range(figures.world))])
    if figures.training:
        output.print_stdout("\ntraining step, the same work for each worker", "bold")
        rows = [
            [str(row["workers"]), f"{row['step_s'] * 1e3:.2f}", f"{row['efficiency']:.0%}"] for row in figures.training
        ]
        output.print_table(rows, header=["WORKERS", "STEP ms", "EFFICIENCY"])
    for sentence in build_conclusions(figures.pairs, figures.training, owners):
        output.print_stdout(f"\n{sentence['summary']}", *(("yellow",) if sentence["fix"] else ()))
        if sentence["fix"]:
            output.print_stdout(f"  {sentence['fix']}")
    output.print_stdout(f"\n{figures.backend}, torch {figures.torch}, {format_count(figures.world, 'worker')}", "dim")
