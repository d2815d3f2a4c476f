"""Whole node scripts, compared with what is kept, checked by bash, and run with a stand-in that shows what arrives.

`UPDATE_GOLDEN=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl import shell
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import Plan
from dtctl.render import render_node_scripts
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes

HERE = Path(__file__).parent
CASES = {
    "torchrun": """
cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}], slots: 4}
job: {name: gpt, script: train.py, args: [--lr, 1e-3]}
train: {lr: 0.001, steps: 100}
""",
    "direct": """
cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1, slots: 2}, {name: b, address: 10.0.0.2, slots: 1}]}
job: {name: gpt, module: my.train, kind: direct, setup: [source ~/venv/bin/activate], secrets: [WANDB_API_KEY]}
network: {interface: eth0}
""",
    "warm": """
cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}], slots: 2}
job: {name: gpt, script: train.py, kind: direct, preload: [torch, my.package]}
""",
    "hostile": r"""
cluster: {transport: ssh, nodes: [{name: "a;b", address: 10.0.0.1, env: {NODE: "it's"}}], slots: 2}
job:
  name: "x $(id) `id`"
  script: "a b'c.py"
  args: ["", "-n", "a\nb", "$HOME", "'", "\"", "é", "*", "~", "a,b", "\\", "!!", "#"]
  env: {VALUE: "a,b 'c' \"d\"\n$(e) `f` \\", NCCL_IB_HCA: "mlx5_0,mlx5_1"}
""",
    "command": """
cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}], slots: 1}
job: {command: "nvidia-smi --query-gpu=name --format=csv"}
""",
}
TWO = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}], slots: 4}\n"
CASES |= {
    "accelerate": TWO
    + """
job: {name: bert, script: nlp_example.py, kind: accelerate, env: {FSDP_TRANSFORMER_CLS_TO_WRAP: BertLayer}}
train: {strategy: hsdp, precision: bf16, accumulate: 2, compile: true, checkpointing: full, model: {layers: 2}}
""",
    "deepspeed": TWO
    + """
job: {name: gpt, script: train.py, kind: deepspeed, add_args: [local_rank, deepspeed_config], args: [--epochs, 3]}
train: {strategy: fsdp, precision: bf16, micro_batch: 4, global_batch: 64, clip_norm: 1.0, fsdp: {cpu_offload: true}}
""",
}
STAND_IN = """#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}))
"""


def plan(case: str) -> Plan:
    spec = parse_spec(CASES[case], source="dtctl.yaml", base_dir=HERE)
    return build(spec, resolve_nodes(spec), run="run-1", facts=PlanFacts(environ={}))


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_the_kept_ones(case: str) -> None:
    made = plan(case)
    for index, script in enumerate(render_node_scripts(made, base_dir=HERE).values()):
        kept = HERE / "scripts" / f"{case}-{index}.sh"
        if os.environ.get("UPDATE_GOLDEN"):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(script)
        assert script == kept.read_text(), f"see {kept}"


@pytest.mark.parametrize("case", CASES)
def test_bash_accepts_them(case: str) -> None:
    for script in render_node_scripts(plan(case), base_dir=HERE).values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("case", CASES)
def test_what_they_start_is_what_the_plan_says(case: str, tmp_path: Path) -> None:
    made = plan(case)
    for node in made.nodes:
        stand_in = tmp_path / node.argv[0]
        stand_in.write_text(STAND_IN.format(python=sys.executable))
        stand_in.chmod(0o755)
        script = render_node_scripts(made, base_dir=HERE)[node.name].replace("source ~/venv/bin/activate", "true")
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "LOCAL_RANK": "1"}
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
        found = json.loads(done.stdout)
        places = {"$LOCAL_RANK": "1", "${HOME}": str(tmp_path)}
        argv = [places.get(word, word) if isinstance(word, shell.ShellExpansion) else word for word in node.argv[1:]]
        assert found["argv"] == [word.replace("=$LOCAL_RANK", "=1") for word in argv]
        late = {v.name for v in node.env if isinstance(v.value, shell.ShellExpansion)}  # the node decides
        said = {v.name: v.value for v in node.env if v.name not in late}
        assert {name: found["env"][name] for name in said} == said
        assert {name: found["env"][name] for name in late} == dict.fromkeys(late, "3")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [("exit 0", 1, "job.setup has ended the script"), ("exit 7", 7, ""), ("false", 1, "line of job.setup has failed")],
)
def test_a_set_up_that_ends_the_script_is_a_failure(line: str, code: int, words: str, tmp_path: Path) -> None:
    """`exit 0` in a file that is sourced ended each worker with success, and none had begun."""
    scripts = render_node_scripts(plan("direct"), base_dir=HERE)
    script = next(iter(scripts.values())).replace("source ~/venv/bin/activate", line)
    assert f"\n{line}\n" in script
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == code
    assert words in done.stderr
    assert bool(words) == bool(done.stderr)
