"""Draws which workers form a group, and what each of them holds, by the arithmetic that dtctl places workers with.

    python docs/meshes.py          writes docs/pictures/mesh.*.svg and strategies.*.svg, for light and dark pages

The same code gives the same files, byte by byte; tests/unit/test_pictures.py holds the committed ones to that.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl

from dtctl.train.mesh import Coordinate, Degrees, resolve_degrees

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = Path(__file__).resolve().parent / "pictures"
THEMES: Final = {
    "light": {
        "text": "#1f2328",
        "empty": "#e6e8eb",
        "on": "#ffffff",
        "groups": ("#3f51b5", "#c2185b", "#00796b", "#bf5a00", "#6a3fa0", "#37718e", "#7a6a00", "#a03a2e"),
    },
    "dark": {
        "text": "#e6edf3",
        "empty": "#30363d",
        "on": "#0d1117",
        "groups": ("#8c9eff", "#f48fb1", "#4db6ac", "#ffb74d", "#b39ddb", "#81c1dd", "#dccb5a", "#ef9a8d"),
    },
}
NODES, PER_NODE = 2, 8
MESH: Final = {"pp": 2, "fsdp": 4, "tp": 2}
AXES: Final = {
    "tp": "tp: split each matrix; neighbours, inside a node",
    "fsdp": "fsdp: share parameters, take other samples",
    "pp": "pp: hand the stream from stage to stage",
}
STRATEGIES: Final[dict[str, str | dict[str, int]]] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "hsdp": "hsdp",
    "{dp: 2, tp: 2}": {"dp": 2, "tp": 2},
    "pipeline": "pipeline",
}
HELD: Final = ("weights", "gradients", "optimizer")
PARTS: Final = 4


def mesh(colours: dict[str, Any]) -> Any:
    """Sixteen workers on two nodes, coloured by the groups of each axis."""
    from matplotlib import pyplot as plt

    degrees = resolve_degrees(MESH, workers=NODES * PER_NODE, per_node=PER_NODE)
    figure, panels = plt.subplots(len(AXES), 1, figsize=(7.2, 5.0))
    for axes, (axis, title) in zip(panels, AXES.items(), strict=True):
        groups = sorted({_group(degrees, rank, axis) for rank in range(degrees.workers)})
        for rank in range(degrees.workers):
            group = groups.index(_group(degrees, rank, axis))
            node, slot = divmod(rank, PER_NODE)
            _cell(axes, slot, node, colours["groups"][group % len(colours["groups"])])
            axes.text(slot + 0.46, node + 0.44, str(rank), ha="center", va="center", color=colours["on"], fontsize=9)
        for node in range(NODES):
            axes.text(-0.15, node + 0.44, f"node{node + 1}", ha="right", va="center", color=colours["text"], fontsize=9)
        axes.set_title(title, loc="left", color=colours["text"], fontsize=10)
        _frame(axes, width=PER_NODE, height=NODES)
    return figure


def _group(degrees: Degrees, rank: int, axis: str) -> tuple[int, ...]:
    """What the members of a worker's group along an axis have in common: their place along the others."""
    at = Coordinate(degrees=degrees, rank=rank)
    places = {"pp": at.stage, "fsdp": at.data, "cp": at.cp, "tp": at.tp}
    return tuple(place for name, place in places.items() if name != axis)


def strategies(colours: dict[str, Any]) -> Any:
    """What each of four workers on two nodes holds of a model's weights, gradients and optimizer state."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(STRATEGIES), PARTS, figsize=(7.2, 7.4))
    for row, (name, strategy) in zip(panels, STRATEGIES.items(), strict=True):
        degrees = resolve_degrees(strategy, workers=PARTS, per_node=PARTS // NODES)
        for rank, axes in enumerate(row):
            at = Coordinate(degrees=degrees, rank=rank)
            for line, what in enumerate(HELD):
                held = holds(at, what, divided=name == "zero1")
                for part in range(PARTS):
                    _cell(axes, part, line, colours["groups"][line] if part in held else colours["empty"])
                if rank == 0:
                    axes.text(-0.2, line + 0.44, what, ha="right", va="center", color=colours["text"], fontsize=8)
            title = f"{name}\n" if rank == 0 else "\n"
            samples = f"samples {'ABCD'[at.data]}"
            axes.set_title(f"{title}rank {rank}, {samples}", loc="left", color=colours["text"], fontsize=8.5)
            _frame(axes, width=PARTS, height=len(HELD))
    return figure


def holds(at: Coordinate, what: str, *, divided: bool) -> range:
    """Which quarters of the model's weights, gradients or optimizer state a worker keeps between two steps.

    Args:
        at: where it stands.
        what: one of `HELD`.
        divided: whether replicas divide the optimizer's state among themselves, as with zero1.
    """
    degrees = at.degrees
    parts, part = degrees.pp * degrees.fsdp * degrees.tp, 0
    for index, degree in ((at.stage, degrees.pp), (at.data % degrees.fsdp, degrees.fsdp), (at.tp, degrees.tp)):
        part = part * degree + index
    if divided and what == "optimizer":
        parts, part = parts * degrees.dp, part * degrees.dp + at.data // degrees.fsdp
    return range(part * PARTS // parts, (part + 1) * PARTS // parts)


def _cell(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.add_patch(mpl.patches.Rectangle((x, y), 0.92, 0.88, color=colour, linewidth=0))


def _frame(axes: Axes, *, width: int, height: int) -> None:
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()


def drawn(draw: Callable[[dict[str, Any]], Any], theme: str) -> str:
    """A picture as SVG."""
    mpl.use("svg")
    from matplotlib import pyplot as plt

    style = {"svg.hashsalt": draw.__name__, "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context(style):
        figure = draw(THEMES[theme])
        figure.tight_layout()
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": "docs/meshes.py"})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def main() -> None:
    """Draw both for both themes."""
    for draw in (mesh, strategies):
        for theme in THEMES:
            (PICTURES / f"{draw.__name__}.{theme}.svg").write_text(drawn(draw, theme), encoding="utf-8")
    print(f"drawn in {PICTURES}")


if __name__ == "__main__":
    main()
