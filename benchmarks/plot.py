"""Draws a result of benchmarks/launch.py; run with the peers' environment, which has matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Write a picture beside the JSON file named on the command line."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(sys.argv[1])
    kept = json.loads(path.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    rows = {name: row["median_s"] for name, row in kept["true on 16 nodes"].items() if "median_s" in row}
    colours = ["#2f6fde" if name == "dtctl" else "#b8bec8" for name in rows]
    left.barh(list(rows), list(rows.values()), color=colours)
    left.invert_yaxis()
    left.set_title("`true` on 16 nodes, fresh process")
    left.set_xlabel("seconds (median)")
    for index, value in enumerate(rows.values()):
        left.text(value, index, f" {value:.2f}", va="center", fontsize=9)
    sizes = [int(n) for n in kept["growth"]]
    for name, colour in (("bare paramiko", "#8a93a3"), ("dtctl", "#2f6fde")):
        right.plot(
            sizes, [kept["growth"][str(n)][name]["median_s"] for n in sizes], marker="o", color=colour, label=name
        )
    right.set_xscale("log", base=2)
    right.set_xticks(sizes, [str(n) for n in sizes])
    right.set_ylim(bottom=0)
    right.set_xlabel("nodes (all on one 2-core machine)")
    right.set_ylabel("seconds (median)")
    right.set_title("how it grows")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=130)
    print(f"drawn in {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
