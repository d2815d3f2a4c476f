"""Makes docs/equality.md of the JSON that test_equality.py leaves with DTCTL_EQUALITY=FILE.

DTCTL_EQUALITY=equality.json python -m pytest tests/integration/test_equality.py
python tests/integration/equality_table.py equality.json docs/equality.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# Every strategy gives the weights of one process

The strategies differ from one process, and from each other, only by rounding. The table shows the differences that a
test measured.

Each row trains the same model with the same data and global batch: the GPT of the examples, with tied embeddings,
some frozen parameters and no dropout, with clipping, weight decay, accumulation and a short last batch, on gloo and
CPUs. A column shows the largest difference from one process, relative to the largest entry of its tensor: "losses" of
losses, gradient norms and validation losses, "parameters" of the final parameters, "optimizer state" of its final
state. Each run also loads a snapshot of one process and one of its own, and writes it again with the same digest.
Rows with `data.mixture` train a mixture of experts: `own` is dtctl's layer with shared and idle experts, dropped
tokens, and losses and a bias that balance the experts; `layouts` are layers in the forms of Transformers and
torchtitan.

`tests/integration/equality_table.py` generates this page from the results of `tests/integration/test_equality.py`,
torch {torch}.

| workers | strategy | options | optimizer | numbers | losses | parameters | optimizer state | limit |
|---|---|---|---|---|---|---|---|---|
"""


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    strategy = case["strategy"]
    mesh = strategy if isinstance(strategy, str) else " x ".join(f"{axis} {size}" for axis, size in strategy.items())
    options = [
        f"{group}.{key}={json.dumps(value)}" if isinstance(values, dict) else f"{group}={values}"
        for group, values in case["options"].items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    cells = [
        case["workers"], mesh, ", ".join(options), case["optimizer"], case["dtype"],
        *(f"{case[name]:.1e}" for name in ("losses", "weights", "optimizer_state")), f"{case['limit']:.0e}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |\n"


def main(source: Path, target: Path) -> None:
    """Write the table."""
    found = json.loads(source.read_text())
    target.parent.mkdir(exist_ok=True)
    target.write_text(HEAD.format(torch=found["torch"]) + "".join(map(row, found["cases"])))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
