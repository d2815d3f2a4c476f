"""The linter as a whole: files that cannot be read, comments, imports, fixes, formats, the seed guides' mistakes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.errors import UsageError
from dtctl.lint import formats
from dtctl.lint.engine import lint_paths
from dtctl.lint.fixes import FixResult, apply_fixes, fixed_text
from dtctl.lint.model import ClusterFacts, Problem
from dtctl.lint.rules import load_lint_rules
from tests.command_line import dtctl
from tests.facts import missing, raises

sys.path.insert(0, str(Path(__file__).parent))
from snippets import PRELUDE, found, problems

HERE = Path(__file__).parent


def test_a_syntax_error_is_reported_and_the_rest_still_checked(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def broken(:\n    pass\n")
    (tmp_path / "b.py").write_text("import torch\nmodel = torch.nn.DataParallel(m)\n")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.py").write_text("x = 1\0")
    got = lint_paths([tmp_path], cluster=ClusterFacts())
    assert [(Path(one.path).name, one.rule, one.line) for one in got] == [
        ("a.py", "DT000", 1),
        ("b.py", "DT001", 2),
        ("c.py", "DT000", 1),
        ("d.py", "DT000", 1),
    ]


def test_a_path_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    with raises(UsageError, "file"):
        lint_paths([tmp_path / "nothing.py"], cluster=ClusterFacts())


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    for number in range(120):
        (tmp_path / f"f{number:03}.py").write_text("import torch\nm = torch.nn.DataParallel(m)\n")
    one, many = (lint_paths([tmp_path], cluster=ClusterFacts(), jobs=jobs) for jobs in (1, 2))
    assert one == many
    assert len(one) == 120


def test_comments_wave_problems_aside() -> None:
    line = "model = nn.DataParallel(model)"
    assert "DT001" in found(line)
    assert "DT001" not in found(f"{line}  # dtctl: ignore[DT001]")
    assert "DT001" not in found(f"{line}  # dtctl: ignore")
    assert "DT001" in found(f"{line}  # dtctl: ignore[DT002]")
    assert "DT001" not in found(f"# dtctl: ignore-file[DT001, DT002]\n{line}")
    assert "DT001" not in found(f"# dtctl: ignore-file\n{line}")
    assert found("export NCCL_TIMEOUT=3  # dtctl: ignore[DT029]", name="run.sh") == set()


def test_columns_count_characters() -> None:
    (problem,) = problems("müller = 'ü'; model = nn.DataParallel(müller)\n")
    assert problem.column == "müller = 'ü'; model = nn.DataParallel(müller)".index("nn") + 1


def test_local_imports_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "setup_dist.py").write_text(
        "import torch.distributed as dist\n"
        "def setup():\n    dist.init_process_group('nccl')\n"
        "def mean(x):\n    dist.all_reduce(x)\n    return x\n"
    )
    main = tmp_path / "train.py"
    main.write_text(
        "import torch\nimport torch.distributed as dist\nfrom setup_dist import setup, mean\n"
        "setup()\ntorch.cuda.set_device(0)\n"
        "if dist.get_rank() == 0:\n    print(mean(torch.ones(1)))\n"
    )
    got = {(one.rule, one.line) for one in lint_paths([main], cluster=ClusterFacts())}
    assert ("DT007", 5) in got  # a distributed job: the process group is started in the other file
    assert ("DT011", 7) in got  # and so is the collective
    (tmp_path / "setup_dist.py").write_text("def setup(): ...\ndef mean(x): ...\n")
    assert lint_paths([main], cluster=ClusterFacts()) == []


def test_the_spec_decides_what_is_wrong_on_several_nodes() -> None:
    code = "dist.init_process_group('nccl')\ntorch.cuda.set_device(dist.get_rank())\n"
    severities = {
        nodes: [one.severity for one in problems(code, nodes=nodes) if one.rule == "DT016"] for nodes in (None, 1, 2)
    }
    assert severities == {None: ["warning"], 1: [], 2: ["error"]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "s = DistributedSampler(ds)\nfor epoch in range(9):\n    run(s)\n",
            "s = DistributedSampler(ds)\nfor epoch in range(9):\n    s.set_epoch(epoch)\n    run(s)\n",
        ),
        (
            "from torch.cuda.amp import autocast, GradScaler\nscaler = GradScaler()\n"
            "with autocast(dtype=d):\n    f()\n",
            'from torch.amp import autocast, GradScaler\nscaler = GradScaler("cuda")\n'
            'with autocast("cuda", dtype=d):\n    f()\n',
        ),
        ("with torch.cuda.amp.autocast():\n    f()\n", 'with torch.amp.autocast("cuda"):\n    f()\n'),
        (
            "local_rank = int(os.environ['LOCAL_RANK'])\ndist.init_process_group('nccl')\nd = torch.device('cuda:0')\n"
            "torch.cuda.set_device(0)\n",
            "local_rank = int(os.environ['LOCAL_RANK'])\ndist.init_process_group('nccl')\n"
            'd = torch.device(f"cuda:{local_rank}")\ntorch.cuda.set_device(local_rank)\n',
        ),
        (
            "model = DDP(net)\nfor i, x in enumerate(loader):\n    x = x.cuda()\n    loss = model(x)\n"
            "    loss.backward()\n    if (i + 1) % 4 == 0:\n        optimizer.step()\n",
            "model = DDP(net)\nfor i, x in enumerate(loader):\n    x = x.cuda()\n"
            "    with contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync():\n"
            "        loss = model(x)\n        loss.backward()\n"
            "    if (i + 1) % 4 == 0:\n        optimizer.step()\n",
        ),
    ],
    ids=["set_epoch", "amp imported", "amp spelt out", "device", "no_sync"],
)
def test_fixes(before: str, after: str) -> None:
    text, mended = fixed_text(PRELUDE + before, problems(before))
    assert text == PRELUDE + after
    ast.parse(text)
    assert mended
    broken = {one.rule for one in mended}
    assert not broken & found(after), "what was mended is no longer found"


def test_the_old_launcher_is_replaced_where_the_script_reads_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m torch.distributed.launch --nproc_per_node=4 --use_env train.py\n")
    apply_fixes(path, lint_paths([path], cluster=ClusterFacts()))
    assert path.read_text() == "torchrun --nproc_per_node=4 train.py\n"
    path.write_text("python -m torch.distributed.launch --nproc_per_node=4 train.py\n")
    assert apply_fixes(path, lint_paths([path], cluster=ClusterFacts())) == FixResult()


def test_fixing_keeps_the_mode_and_line_ends_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"import torch\r\nwith torch.cuda.amp.autocast():\r\n    pass\r\n")
    path.chmod(0o755)
    assert [one.rule for one in apply_fixes(path, lint_paths([path], cluster=ClusterFacts())).mended] == ["DT025"]
    assert path.read_bytes() == b'import torch\r\nwith torch.amp.autocast("cuda"):\r\n    pass\r\n'
    assert path.stat().st_mode & 0o777 == 0o755
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def sample() -> list[Problem]:
    return problems("if rank == 0:\n    dist.barrier()\nmodel = nn.DataParallel(model)\n")


def test_json_has_the_keys_of_the_contract() -> None:
    first = formats.build_json_problems(sample())[0]
    assert list(first) == ["rule", "severity", "path", "line", "column", "message", "fix"]
    assert (first["rule"], first["severity"]) == ("DT011", "error")


def test_sarif_names_every_rule_once_and_points_at_it() -> None:
    log = json.loads(formats.format_json_value(formats.build_sarif_log(sample(), "1.2")))
    (run,) = log["runs"]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert ids == ["DT001", "DT011"]
    assert [ids[one["ruleIndex"]] for one in run["results"]] == [one["ruleId"] for one in run["results"]]
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": PRELUDE.count("\n") + 2, "startColumn": 5}
    assert [one["level"] for one in run["results"]] == ["error", "warning"]


def test_github_commands_escape_what_would_end_them() -> None:
    one = sample()[0]
    text = formats.format_github_command(one)
    assert text.startswith(f"::error file=train.py,line={one.line},col=5,title=DT011::")
    assert "\n" not in text


def test_every_rule_explains_itself() -> None:
    for rule in load_lint_rules().values():
        text = formats.explained(rule)
        assert rule.wrong.splitlines()[0] in text
        assert rule.source in text


# Lines of the two guides that dtctl began with, and the rules that each of them breaks.
GUIDES = {
    "guide2": {"DT001", "DT009", "DT013", "DT014", "DT016", "DT018", "DT020", "DT025", "DT035"},
    "guide3": {"DT001", "DT002", "DT003", "DT004", "DT005", "DT007", "DT009", "DT010", "DT012", "DT025", "DT026"},
}


@pytest.mark.parametrize("guide", GUIDES)
def test_the_guides_scripts_give_what_is_known_of_them(guide: str) -> None:
    text = (HERE / "guides" / f"{guide}.py.txt").read_text(encoding="utf-8")
    assert GUIDES[guide] <= found(text, bare=True)


def test_the_third_guides_right_template_has_no_error() -> None:
    text = (HERE / "guides" / "guide3-template.py.txt").read_text(encoding="utf-8")
    assert [one for one in problems(text, bare=True) if one.severity == "error"] == []


def test_the_guides_shell_scripts() -> None:
    text = (HERE / "guides" / "guides.sh.txt").read_text(encoding="utf-8")
    got = {(one.rule, one.line) for one in problems(text, name="launch.sh")}
    names = {line.split("=")[0].removeprefix("export ") for number, line in enumerate(text.split("\n"), 1)
             if ("DT029", number) in got}  # fmt: skip
    assert names == {"NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_TIMEOUT", "NCCL_IB_HCA",
                     "NCCL_DEBUG_FILE"}  # fmt: skip
    assert sum(rule == "DT025" for rule, _ in got) == 1, "once for each name and file"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return dtctl("lint", *arguments, cwd=cwd)


def test_without_paths_it_reads_what_a_launch_sends(tmp_path: Path) -> None:
    for name in ("train.py", "lib/net.py", "drafts/old.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import torch\nmodel = torch.nn.DataParallel(m)\n")
    (tmp_path / ".gitignore").write_text("drafts/\n")
    (tmp_path / "notes.md").write_text("# notes\n")
    (tmp_path / "dtctl.yaml").write_text("job: {script: train.py}\n")
    done = run(cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    found = [line.split(":")[0] for line in done.stdout.splitlines() if "DT001" in line]
    assert found == ["lib/net.py", "train.py"]
    assert "2 files that a launch of dtctl.yaml sends" in done.stderr
    inner = run("--spec", "../dtctl.yaml", cwd=tmp_path / "lib")
    assert [line.split(":")[0] for line in inner.stdout.splitlines() if "DT001" in line] == ["net.py", "../train.py"]
    (tmp_path / "dtctl.yaml").write_text("job: {script: train.py, files: {push: false, root: lib/..}}\n")
    assert [row["path"] for row in json.loads(run("--format", "json", cwd=tmp_path).stdout)] == ["train.py"]
    (tmp_path / "dtctl.yaml").write_text("job: {command: 'true', files: {push: false}}\n")
    nothing = run(cwd=tmp_path)
    assert (nothing.returncode, "dtctl.yaml sends no Python or shell file" in nothing.stderr) == (2, True)
    (tmp_path / "dtctl.yaml").write_text("nonsense: 1\n")
    assert run(cwd=tmp_path).returncode == 3


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print(1)\n")
    (tmp_path / "bad.py").write_text("import torch\nmodel = torch.nn.DataParallel(m)\n")
    (tmp_path / "hint.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert run("ok.py", cwd=tmp_path).returncode == 0
    assert run("hint.py", cwd=tmp_path).returncode == 0
    done = run("bad.py", cwd=tmp_path)
    assert done.returncode == 9
    assert done.stdout.startswith("bad.py:2:9: warning DT001 nn.DataParallel")
    assert run("bad.py", "--select", "DT002", cwd=tmp_path).returncode == 0
    assert json.loads(run(".", "--format", "json", "--severity", "warning", cwd=tmp_path).stdout)[0]["rule"] == "DT001"
    assert run(cwd=tmp_path).returncode == 2
    assert run("--select", "DT999", "ok.py", cwd=tmp_path).returncode == 2
    assert "Wrong:" in run("--explain", "dt011", cwd=tmp_path).stdout
    (tmp_path / "dtctl.yaml").write_text("nonsense: 1\n")
    done = run("ok.py", cwd=tmp_path)
    assert done.returncode == 0
    assert not missing(done.stderr, "dtctl.yaml")
    assert run("ok.py", "--spec", "dtctl.yaml", cwd=tmp_path).returncode == 3
