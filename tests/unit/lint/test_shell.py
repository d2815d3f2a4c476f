"""Shell files: what is run and what is only text, and what --fix may write into them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.lint.engine import lint_paths
from dtctl.lint.fixes import apply_fixes
from dtctl.lint.model import ClusterFacts
from dtctl.lint.shell_words import parse_shell_script

sys.path.insert(0, str(Path(__file__).parent))
from snippets import found, problems

OLD = "python -m torch.distributed.launch --use_env --nproc_per_node=8 train.py"


def mended(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.sh"
    path.write_text(text)
    problems = lint_paths([path], cluster=ClusterFacts())
    assert {one.rule for one in problems} <= {"DT025"}
    apply_fixes(path, problems)
    return path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        f'CMD="{OLD}"\n$CMD\n',
        f"CMD=({OLD})\n",
        f"bash -c '{OLD}'\n",
        f'ssh gpu01 "cd /w && {OLD}"\n',
        f'echo "{OLD}"\n',
        f"cat > run.sh <<EOF\n{OLD}\nEOF\n",
        f'x="$({OLD})"\n',
        OLD.replace("--use_env ", "") + "\n",
        OLD.replace("--use_env ", "") + " --use_env\n",
        f'{OLD}\necho "does not end\n',
        "python -m torch.distributed.launch \"--use_env\" train.py\n",
    ],
)  # fmt: skip
def test_what_is_quoted_or_only_text_is_not_touched(tmp_path: Path, text: str) -> None:
    assert mended(tmp_path, text) == text


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (OLD, "torchrun --nproc_per_node=8 train.py"),
        (f"OMP_NUM_THREADS=1 {OLD} | tee log", "OMP_NUM_THREADS=1 torchrun --nproc_per_node=8 train.py | tee log"),
        (f"if true; then {OLD} 2>&1; fi", "if true; then torchrun --nproc_per_node=8 train.py 2>&1; fi"),
        (f"/opt/conda/bin/{OLD}", "/opt/conda/bin/python -m torch.distributed.run --nproc_per_node=8 train.py"),
        (f"srun {OLD}", "srun python -m torch.distributed.run --nproc_per_node=8 train.py"),
        (OLD.replace("python", "python -u"), "python -u -m torch.distributed.run --nproc_per_node=8 train.py"),
        (
            "# é\npython -m torch.distributed.launch \\\n    --nproc_per_node 8 \\\n    --use_env \\\n    train.py 'é'",
            "# é\ntorchrun \\\n    --nproc_per_node 8 \\\n    \\\n    train.py 'é'",
        ),
    ],
)
def test_a_simple_command_calls_torchrun(tmp_path: Path, text: str, after: str) -> None:
    got = mended(tmp_path, text + "\n")
    assert got.replace("   \\", "    \\").replace("     \\", "    \\") == after + "\n"
    if shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=got.encode(), check=True)


def test_a_script_that_the_shell_would_not_read_is_left_as_it_was(tmp_path: Path) -> None:
    text = f"{OLD}\nif true; then\n"
    if shutil.which("bash"):
        assert mended(tmp_path, text) == text


@pytest.mark.parametrize(
    "text",
    [
        'echo "set NCCL_TIMEOUT=1"',
        "printf 'NCCL_TIMEOUT=%s' NCCL_TIMEOUT=1",
        "cat <<EOF\nexport NCCL_TIMEOUT=1\nEOF",
        "cat >> notes <<-'END'\n\tNCCL_TIMEOUT=1\n\tEND",
        'if [ "$NCCL_TIMEOUT" = 1 ]; then :; fi',
    ],
)
def test_what_is_only_said_sets_nothing(text: str) -> None:
    assert found(text + "\n", name="run.sh") == set()


@pytest.mark.parametrize(
    "text",
    [
        "export NCCL_TIMEOUT=1",
        'echo "NCCL_DEBUG=INFO" && export NCCL_TIMEOUT=1',
        "cat <<EOF\ntext\nEOF\nexport NCCL_TIMEOUT=1",
        "sbatch <<EOF\n#!/bin/bash\nexport NCCL_TIMEOUT=1\nEOF",
        "(( x = 1 << 3 ))\nexport NCCL_TIMEOUT=1",
        'x="$(echo "a b")"; export NCCL_TIMEOUT=1',
        "mpirun -x NCCL_TIMEOUT=1 python train.py",
        'ssh gpu01 "export NCCL_TIMEOUT=1; python train.py"',
    ],
)
def test_what_is_run_sets_it(text: str) -> None:
    assert found(text + "\n", name="run.sh") == {"DT029"}


def test_protocols_other_than_ll128_corrupt_nothing() -> None:
    assert found("export NCCL_PROTO=Simple\n", name="run.sh") == {"DT029"}
    (simple,) = problems("export NCCL_PROTO=Simple\n", name="run.sh")
    (risky,) = problems("export NCCL_PROTO=LL128\n", name="run.sh")
    assert (simple.severity, risky.severity) == ("info", "warning")
    assert "corrupt" not in simple.fix + simple.message
    assert "corrupt" in risky.fix


def test_variables_of_rccl_are_those_of_nccl_and_its_own() -> None:
    assert found("export RCCL_DEBUG=INFO\n", name="run.sh") == {"DT029"}
    assert found("export RCCL_MSCCL_ENABLE=0\n", name="run.sh") == set()
    assert found("import os\nos.environ['RCCL_DEBUG'] = 'INFO'\n") == {"DT029"}


@pytest.mark.parametrize("text", ["x='a", 'x="a', "x=$(a", "cat <<EOF\nx", "x=`a", "((a", "x=(a", "${a"])
def test_what_does_not_end_is_known_not_to(text: str) -> None:
    assert not parse_shell_script(text).complete
    assert parse_shell_script('a \'b\' "c $(d ")") e" $((1 << 2)) <<X\n\'\nX\nf=(1 2)\n').complete


def test_substitutions_a_thousand_deep_are_read_without_their_words() -> None:
    assert found("x=" + '"$(' * 3000 + "\nexport NCCL_TIMEOUT=1\n", name="run.sh") <= {"DT029"}
