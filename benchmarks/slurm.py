"""What dtctl adds to a submission beside bare sbatch, on real Slurm; and a batch file for 1,000 nodes.

sudo python benchmarks/slurm.py [--rounds N]      half a minute; starts a sandbox of its own, as root
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import keep, wait_for_quiet

from dtctl.sandbox import control, slurm

NODES = 1000
SPEC = """\
cluster: {{transport: slurm, nodes: {nodes}, slots: {slots}}}
job: {{name: empty, script: train.py, kind: direct}}
"""


def took(argv: list[str], **options: object) -> float:
    """Seconds of a whole process."""
    begun = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    return time.perf_counter() - begun


def main() -> None:
    """Measure in turn, print the medians, keep all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    wait_for_quiet()
    base = Path(tempfile.mkdtemp(prefix="dtctl-bench-"))
    os.environ["DTCTL_SANDBOX_DIR"] = str(base / "sandboxes")
    project = base / "project"
    project.mkdir()
    sandbox = control.start_sandbox(f"bench-{secrets.token_hex(3)}", nodes=2, with_slurm=True)
    dtctl = [sys.executable, "-m", "dtctl", "sbatch"]
    found: dict[str, list[float]] = {"sbatch": [], "sbatch --test-only": [], "dtctl sbatch --submit": [], "render": []}
    try:
        env = {**os.environ, **slurm.build_slurm_environment(sandbox)}
        (project / "train.py").write_text("")
        (project / "dtctl.yaml").write_text(SPEC.format(nodes=2, slots=1))
        (project / "many.yaml").write_text(SPEC.format(nodes=NODES, slots=8))
        asked = subprocess.run(["sbatch", "--version"], env=env, capture_output=True, text=True, check=True)
        version = asked.stdout.strip()
        subprocess.run([*dtctl, "--out", "bare.sbatch"], cwd=project, env=env, check=True, capture_output=True)
        for _ in range(rounds):
            found["sbatch"].append(took(["sbatch", "--parsable", "bare.sbatch"], cwd=project, env=env))
            found["sbatch --test-only"].append(took(["sbatch", "--test-only", "bare.sbatch"], cwd=project, env=env))
            found["dtctl sbatch --submit"].append(took([*dtctl, "--submit"], cwd=project, env=env))
            found["render"].append(took([*dtctl, "many.yaml"], cwd=project, env=env))
            subprocess.run(["scancel", "--user=root"], env=env, check=True)
    finally:
        control.remove_sandbox(sandbox.name)
        shutil.rmtree(base)
    medians = {name: round(statistics.median(times), 4) for name, times in found.items()}
    for name, seconds in medians.items():
        print(f"{name:24} {seconds:.3f} s")
    overhead = round(medians["dtctl sbatch --submit"] - medians["sbatch"], 4)
    print(f"overhead of a submission {overhead:.3f} s; a file for {NODES} nodes {medians['render']:.3f} s")
    keep(
        "slurm",
        {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
            "versions": {"slurm": version, "python": platform.python_version()},
            "rounds": rounds,
            "median_s": medians,
            "overhead_s": overhead,
            "nodes_of_render": NODES,
            "all_s": {name: [round(one, 4) for one in times] for name, times in found.items()},
        },
    )


if __name__ == "__main__":
    main()
