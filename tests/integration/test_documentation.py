"""The pictures of the documentation in a real browser: drawn, and without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).resolve().parents[2]


def test_every_picture_is_drawn_and_nothing_is_loaded_from_the_network(tmp_path: Path) -> None:
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium; .ci/setup.sh installs it")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(build, cwd=ROOT, check=True)
    complaints: list[str] = []
    remote: list[str] = []
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else remote.append(request.url))
        page.goto((tmp_path / "site" / "architecture.html").as_uri())
        # The theme turns the text of each picture, a <pre>, into a <div> once mermaid has drawn it.
        page.wait_for_function("document.querySelectorAll('div.mermaid').length === 3")
        heights = page.evaluate("[...document.querySelectorAll('div.mermaid')].map(picture => picture.clientHeight)")
        browser.close()
    assert min(heights) > 200
    assert (complaints, remote) == ([], [])
