from pathlib import Path

from dtctl.bench.job import BenchmarkRequest, build_bench_spec
from dtctl.plan.build import PlanFacts, build
from dtctl.spec.load import parse_spec
from dtctl.spec.nodes import resolve_nodes

NODE = "cluster: {transport: ssh, nodes: [{name: a, address: 10.0.0.1}], slots: 2}\n"


def test_what_a_framework_is_told_is_not_for_the_benchmark(tmp_path: Path) -> None:
    job = "kind: deepspeed, add_args: [deepspeed_config], deepspeed: {train_batch_size: 2}"
    text = NODE + f"job: {{script: train.py, {job}}}\ntrain: {{micro_batch: 1}}"
    measured = build_bench_spec(
        parse_spec(text, source="dtctl.yaml", base_dir=tmp_path),
        tmp_path,
        BenchmarkRequest(ops=("all_reduce",), sizes=(8,)),
    )
    plan = build(measured, resolve_nodes(measured), run="run-1", facts=PlanFacts())
    assert plan.kind == "torchrun"
    assert not any("deepspeed" in word or "parallel" in word for word in plan.head.argv)
