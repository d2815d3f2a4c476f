"""Makes the pictures of the documentation anew, each from a real run on this machine; some minutes, as root.

    python docs/pictures.py             all of them
    python docs/pictures.py doctor      one

Plots of benchmarks are not among them: benchmarks/plot.py draws those from kept results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from recorder import record

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
DTCTL = [sys.executable, "-m", "dtctl"]
BROWSER = "/usr/lib/chromium/chromium-headless-shell"
"""Where Debian's package has it."""


def dtctl(*arguments: str, folder: Path) -> None:
    """Run a command, in a folder."""
    subprocess.run([*DTCTL, *arguments], cwd=folder, check=True)


def photograph(page: Path, name: str, *, width: int, height: int) -> None:
    """Two pictures of the top of a page: light and dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
            tab.goto(page.as_uri())
            tab.wait_for_load_state("networkidle")
            tab.screenshot(path=str(PICTURES / f"{name}.{theme}.png"))
        browser.close()


def demo() -> None:
    """A launch, a kill and a recovery, in the terminal and as the report shows them."""
    record([sys.executable, "examples/demo.py"], PICTURES / "demo.svg", title="make demo", columns=112)
    gpt = ROOT / "examples" / "gpt"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        dtctl("report", "-o", str(page), folder=gpt)
        photograph(page, "report", width=1100, height=1000)


def doctor() -> None:
    """A firewall on one of three hosts."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        cluster = f"{{transport: sandbox, nodes: 3, slots: 1, python: {sys.executable}}}"
        (here / "dtctl.yaml").write_text(f"cluster: {cluster}\njob: {{script: train.py}}\n")
        (here / "train.py").write_text("")
        dtctl("sandbox", "up", "--nodes", "3", folder=here)
        try:
            dtctl("sandbox", "fault", "drop", "node2", "--port", "20000:65535", folder=here)
            os.chdir(here)
            record([*DTCTL, "doctor", "--skip", "collective"], PICTURES / "doctor.svg", title="dtctl doctor", code=9)
            dtctl("sandbox", "heal", folder=here)
            dtctl("bench", "--op", "p2p", "--op", "all_reduce", "--plot", str(PICTURES / "bench.svg"), folder=here)
        finally:
            os.chdir(ROOT)
            dtctl("sandbox", "down", folder=here)


def advise() -> None:
    """What fits, as bars."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "advise.html"
        asked = ("--params", "7B", "--gpus", "16", "--gpu", "A100", "--batch", "64")
        dtctl("advise", *asked, "--plot", str(page), folder=Path(folder))
        photograph(page, "advise", width=1000, height=620)


ALL: tuple[Callable[[], None], ...] = (demo, doctor, advise)


def main() -> None:
    """Make those that are named, or all."""
    os.chdir(ROOT)
    wanted = sys.argv[1:]
    for make in ALL:
        if not wanted or make.__name__ in wanted:
            make()
            print(f"made: {make.__name__}")


if __name__ == "__main__":
    main()
