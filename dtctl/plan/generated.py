"""Variables and arguments from `train:` for frameworks other than dtctl.runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan.model import WORKER_KINDS, GeneratedConfig, Kind, NodeRanks, count_workers
from dtctl.spec.model import Spec

if TYPE_CHECKING:
    from dtctl.plan.frameworks import FrameworkSettings


LOCAL_RANK_ARGUMENT = "--local_rank"
"""Argument that DeepSpeed's launcher adds, and programs of DeepSpeed expect."""


def generate_framework_input(
    spec: Spec, kind: Kind, placements: Sequence[NodeRanks], *, slots_known: bool
) -> GeneratedConfig:
    """Return the variables and arguments for the framework of a job.

    Args:
        spec: the spec.
        kind: of the job.
        placements: its workers.
        slots_known: True if their number is known; False before `slots: auto` is counted on the nodes.

    Raises:
        PlanError: a key of `train:` has no counterpart in the framework, or the kind does not support an argument.
    """
    usual = ("local_rank",) if kind == "deepspeed" else ()
    added: Sequence[str] = usual if spec.job.add_args is None else spec.job.add_args
    _require_valid_add_args(spec, kind, added)
    local_rank = (shell.ShellExpansion(f"{LOCAL_RANK_ARGUMENT}=${names.LOCAL_RANK}"),) if "local_rank" in added else ()
    framework = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}.get(kind)
    if framework is None or not (spec.train is not None or spec.job.deepspeed):
        return GeneratedConfig(
            args=local_rank, runtime=framework is None and kind != "command" and spec.train is not None
        )
    if not slots_known:
        if spec.cluster.transport == "slurm":
            raise PlanError(
                f"settings of {framework} depend on the number of workers, which is unknown with `slots: auto`",
                where=spec.written_at("cluster.slots"),
                hint="give it as a number: `slots: 8`",
            )
        note = f"the settings of {framework} are derived from `train` once the slots are counted"
        return GeneratedConfig(args=local_rank, notes=(note,))
    slots = {placement.slots for placement in placements}
    per_node = slots.pop() if len(slots) == 1 else 0
    # Few jobs have one of these frameworks, and no job has two.
    from dtctl.plan.frameworks import collect_framework_settings

    settings = collect_framework_settings(spec, framework, workers=count_workers(placements), per_node=per_node)
    if kind == "accelerate":
        from dtctl.plan import accelerate

        return GeneratedConfig(env=accelerate.build_accelerate_variables(settings), args=local_rank)
    return _generate_deepspeed_input(settings, local_rank, as_argument="deepspeed_config" in added)


def _generate_deepspeed_input(
    settings: FrameworkSettings, local_rank: tuple[str, ...], *, as_argument: bool
) -> GeneratedConfig:
    from dtctl.plan import deepspeed

    framework_config = deepspeed.build_deepspeed_config(settings)
    if not framework_config:
        return GeneratedConfig(args=local_rank)
    config = (deepspeed.CONFIG_ARGUMENT, deepspeed.format_config_argument(framework_config)) if as_argument else ()
    return GeneratedConfig(
        env={names.DEEPSPEED_CONFIG: deepspeed.format_config_text(framework_config)}, args=(*local_rank, *config)
    )


def _require_valid_add_args(spec: Spec, kind: Kind, added: Sequence[str]) -> None:
    for word, kinds in (("local_rank", WORKER_KINDS), ("deepspeed_config", {"deepspeed"})):
        if word in added and kind not in kinds:
            raise PlanError(
                f"add_args: {word} does not work with kind {kind}",
                where=spec.written_at("job.add_args"),
                hint=f"it works with kind {', '.join(sorted(kinds))}",
            )
    if "deepspeed_config" in added and spec.train is None and not spec.job.deepspeed:
        raise PlanError(
            "add_args: deepspeed_config is derived from `train`, which the spec lacks",
            where=spec.written_at("job.add_args"),
        )
    if spec.job.deepspeed and kind != "deepspeed":
        raise PlanError(
            f"job.deepspeed is for kind deepspeed, and this is {kind}", where=spec.written_at("job.deepspeed")
        )
