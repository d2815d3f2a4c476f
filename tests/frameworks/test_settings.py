"""What is made of `train:` is what the frameworks themselves read out of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import Plan
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.frameworks.environments import FOLDER, python_of

NODES = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}], slots: 4}\n"


def plan(job: str, train: str) -> Plan:
    text = NODES + f"job: {{script: train.py, {job}}}\ntrain: {train}\n"
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))
    return build(spec, resolve_nodes(spec), run="run-1", facts=PlanFacts())


def said(framework: str, program: str, *arguments: str, env: dict[str, str] | None = None) -> object:
    shown = subprocess.run(
        [python_of(framework), "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(FOLDER / "torch-extensions"), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.splitlines()[-1])


ACCELERATE = """
import json, os
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
sharding, mesh = FullyShardedDataParallelPlugin(), ParallelismConfig()
print(json.dumps([
    sharding.fsdp_version, sharding.reshard_after_forward, sharding.activation_checkpointing,
    sharding.auto_wrap_policy.__name__, mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size,
    TorchDynamoPlugin().backend.value,
]))
"""


def test_accelerate() -> None:
    train = """{strategy: hsdp, fsdp: {reshard_after_forward: false}, checkpointing: full, precision: bf16,
        compile: aot_eager}"""
    made = {variable.name: variable.value for variable in plan("kind: accelerate", train).head.env}
    found = said("accelerate", ACCELERATE, env=made)
    assert found == [2, False, True, "transformer_auto_wrap_policy", 2, 4, 1, "AOT_EAGER"]


DEEPSPEED = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
found = DeepSpeedConfig(sys.argv[1])
print(json.dumps([
    int(found.zero_optimization_stage), found.zero_config.offload_optimizer.device, found.bfloat16_config.enabled,
    found.gradient_clipping, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps,
    found.optimizer_name, found.optimizer_params,
]))
"""


def test_deepspeed() -> None:
    train = """{strategy: fsdp, fsdp: {cpu_offload: true}, precision: bf16, clip_norm: 0.5, micro_batch: 3,
        optimizer: adamw, lr: 0.1}"""
    # The batch of all workers is left open: DeepSpeed would compare it with the one worker that is asked here.
    word = plan("kind: deepspeed, add_args: [deepspeed_config]", train).head.argv[-1]
    found = said("deepspeed", DEEPSPEED, word, env={"DS_ACCELERATOR": "cpu"})
    assert found == [3, "cpu", True, 0.5, 3, 1, "adamw", {"lr": 0.1, "betas": [0.9, 0.95]}]
