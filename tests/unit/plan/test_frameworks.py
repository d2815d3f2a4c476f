"""What is made of `train:` for other people's frameworks, and what is refused."""

import base64
import json
from pathlib import Path

import pytest

from dtctl.errors import PlanError, SpecError
from dtctl.plan.build import PlanFacts, build
from dtctl.plan.model import Plan
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes
from tests.facts import raises

NODES = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.2}], slots: 4}\n"


def plan(kind: str, train: str, *, job: str = "", nodes: str = NODES, **facts: object) -> Plan:
    text = f"{nodes}job: {{script: train.py, kind: {kind}{job}}}\n" + (f"train: {train}" if train else "")
    spec = parse_spec(text, source="dtctl.yaml", base_dir=Path("/project"))
    return build(spec, resolve_nodes(spec), run="run-1", facts=PlanFacts(**facts))  # type: ignore[arg-type]


def generated(found: Plan) -> dict[str, str]:
    """The variables that are made of `train` for a framework."""
    return {variable.name: variable.value for variable in found.head.env if "spec: train, for" in variable.origin}


def environment(found: Plan, node: int = 0) -> dict[str, str]:
    return {variable.name: variable.value for variable in found.nodes[node].env}


@pytest.mark.parametrize("kind", ["accelerate", "deepspeed"])
def test_the_workers_are_started_by_dtctl_and_may_be_unequal(kind: str) -> None:
    nodes = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1, slots: 3}, {name: b, slots: 1}]}\n"
    found = plan(kind, "", nodes=nodes)
    assert [node.processes for node in found.nodes] == [3, 1]
    assert environment(found, 1)["WORLD_SIZE"] == "4"
    assert environment(found, 1)["MASTER_ADDR"] == "10.0.0.1"
    assert found.head.argv[:3] == ("python3", "-u", "train.py")
    assert generated(found) == {}


def test_what_deepspeeds_launcher_gives_its_workers() -> None:
    found = plan("deepspeed", "")
    assert found.head.argv == ("python3", "-u", "train.py", "--local_rank=$LOCAL_RANK")
    given = environment(found, 1)
    assert [given[name] for name in ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")] == ["1", "2", "4"]
    assert plan("deepspeed", "", job=", add_args: []").head.argv == ("python3", "-u", "train.py")


@pytest.mark.parametrize(
    ("train", "config"),
    [
        ("{micro_batch: 2}", {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 2}),
        (
            "{strategy: zero1, global_batch: 64, micro_batch: 2, precision: fp16, clip_norm: 0.5}",
            {
                "zero_optimization": {"stage": 1},
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 4,
                "fp16": {"enabled": True},
                "gradient_clipping": 0.5,
            },
        ),
        (
            "{strategy: {fsdp: -1}, fsdp: {reshard_after_forward: false}, global_batch: 16, accumulate: 2}",
            {
                "zero_optimization": {"stage": 2},
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
            },
        ),
        (
            "{strategy: fsdp, fsdp: {cpu_offload: true}, micro_batch: 1, optimizer: adamw, lr: 0.1, weight_decay: 0.2}",
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "cpu"},
                },
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.2, "betas": [0.9, 0.95]}},
            },
        ),
    ],
)
def test_the_configuration_of_deepspeed(train: str, config: dict[str, object]) -> None:
    found = plan("deepspeed", train, job=", add_args: [deepspeed_config], args: [--x]")
    assert json.loads(generated(found)["DTCTL_DEEPSPEED_CONFIG"]) == config
    *_, option, word, last = found.head.argv
    assert (option, last) == ("--deepspeed_config", "--x")
    assert json.loads(base64.urlsafe_b64decode(word)) == config


def test_further_keys_of_deepspeed_win() -> None:
    more = "{zero_optimization: {overlap_comm: true}, train_batch_size: 8, checkpoint: {use_node_local_storage: true}}"
    found = plan("deepspeed", "{strategy: zero1}", job=f", deepspeed: {more}")
    assert json.loads(generated(found)["DTCTL_DEEPSPEED_CONFIG"]) == {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "train_batch_size": 8,
        "checkpoint": {"use_node_local_storage": True},
    }
    alone = plan("deepspeed", "", job=", deepspeed: {train_batch_size: 8}, add_args: [deepspeed_config]")
    assert json.loads(base64.urlsafe_b64decode(alone.head.argv[-1])) == {"train_batch_size": 8}
    with raises(PlanError, "job.deepspeed accelerate"):
        plan("accelerate", "", job=", deepspeed: {train_batch_size: 8}")


@pytest.mark.parametrize(
    ("train", "variables"),
    [
        ("{strategy: ddp, precision: fp32}", {"ACCELERATE_MIXED_PRECISION": "no"}),
        ("{strategy: {dp: 8}, accumulate: 4}", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
        ("{compile: aot_eager, model: {layers: 3}}", {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}),
        (
            "{strategy: zero1, clip_norm: 1.0}",
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
                "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            },
        ),
        (
            "{strategy: fsdp, fsdp: {reshard_after_forward: false}}",
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": "false",
                "FSDP_OFFLOAD_PARAMS": "false",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_ACTIVATION_CHECKPOINTING": "false",
            },
        ),
        (
            "{strategy: {tp: 4, dp: 2}}",
            {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1",
                "PARALLELISM_CONFIG_CP_SIZE": "1",
                "PARALLELISM_CONFIG_TP_SIZE": "4",
            },
        ),
    ],
)
def test_the_variables_of_accelerate(train: str, variables: dict[str, str]) -> None:
    assert generated(plan("accelerate", train)) == variables


@pytest.mark.parametrize(
    ("gpus", "job", "told"),
    [
        ({"a": 0, "b": 0}, "", "true"),
        ({"a": 0, "b": 8}, "", None),
        ({"a": 0}, "", None),  # nobody has counted those of b
        ({}, "", None),
        ({"a": 8, "b": 8}, ", env: {CUDA_VISIBLE_DEVICES: ''}", "true"),
        ({"a": 0, "b": 0}, ", env: {ACCELERATE_USE_CPU: 'false'}", "false"),
    ],
)
def test_accelerate_is_told_where_no_node_has_a_gpu(gpus: dict[str, int], job: str, told: str | None) -> None:
    """On such nodes each of its workers would train a model of its own."""
    assert environment(plan("accelerate", "", job=job, gpus=gpus)).get("ACCELERATE_USE_CPU") == told
    assert environment(plan("direct", "", gpus=gpus)).get("ACCELERATE_USE_CPU") is None


def test_what_the_user_sets_wins() -> None:
    found = plan("accelerate", "{precision: bf16}", job=", env: {ACCELERATE_MIXED_PRECISION: fp8}")
    assert environment(found)["ACCELERATE_MIXED_PRECISION"] == "fp8"


@pytest.mark.parametrize(
    ("kind", "train", "message"),
    [
        ("accelerate", "{strategy: pipeline}", "Accelerate pipelines"),
        ("accelerate", "{lr: 0.1}", "train.lr"),
        ("accelerate", "{clip_norm: 1.0}", "train.clip_norm"),
        ("accelerate", "{strategy: fsdp, fsdp: {reduce_dtype: bf16}}", "train.fsdp.reduce_dtype"),
        ("accelerate", "{strategy: fsdp, checkpointing: 2}", "checkpoint 2"),
        ("accelerate", "{strategy: single}", "8 workers models"),
        ("accelerate", "{strategy: {dp: 3}}", "mesh dp 3 8"),
        ("deepspeed", "{strategy: tp, micro_batch: 1}", "ddp zero1 fsdp"),
        ("deepspeed", "{strategy: hsdp, micro_batch: 1}", "ddp zero1 fsdp"),
        ("deepspeed", "{strategy: ddp}", "DeepSpeed train.micro_batch train.global_batch"),
        ("deepspeed", "{micro_batch: 1, steps: 5}", "train.steps DeepSpeed"),
        ("deepspeed", "{micro_batch: 3, global_batch: 8}", "global_batch 8 micro_batch 3"),
        (
            "deepspeed",
            "{micro_batch: 1, global_batch: 8, accumulate: 2}",
            "16 global_batch 8",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_where_it_is_written(kind: str, train: str, message: str) -> None:
    with raises(PlanError, message) as caught:
        plan(kind, train)
    assert caught.value.where == "dtctl.yaml:3"


@pytest.mark.parametrize(
    ("kind", "added", "message"),
    [
        ("torchrun", "local_rank", "local_rank torchrun"),
        ("accelerate", "deepspeed_config", "deepspeed_config accelerate"),
        ("deepspeed", "deepspeed_config", "train spec"),
    ],
)
def test_arguments_that_do_not_go_with_the_kind(kind: str, added: str, message: str) -> None:
    with raises(PlanError, message):
        plan(kind, "", job=f", add_args: [{added}]")


def test_what_was_removed_names_what_serves_instead() -> None:
    with raises(SpecError, "CHANGELOG.md job.args"):
        plan("torchrun", "", job=", add_args: [megatron]")


def test_as_long_as_slots_are_not_counted_nothing_is_said_about_them() -> None:
    open_nodes = NODES.replace(", slots: 4", "")
    train = "{strategy: {tp: 4, dp: 2}}"
    found = plan("accelerate", train, nodes=open_nodes)
    assert generated(found) == {}
    assert any("Accelerate" in note and "slots" in note for note in found.notes)
    counted = plan("accelerate", train, nodes=open_nodes, gpus={"a": 4, "b": 4})
    assert generated(counted)["PARALLELISM_CONFIG_TP_SIZE"] == "4"
    with raises(PlanError, "slots auto"):
        plan("accelerate", train, nodes="cluster: {transport: slurm, nodes: 2}\n")
