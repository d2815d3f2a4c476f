"""Variables and arguments that are made of `train:` for a framework other than dtctl's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan.model import WORKER_KINDS, Generated, Kind, Placement, world_size
from dtctl.spec.model import Spec

if TYPE_CHECKING:
    from dtctl.plan.frameworks import FrameworkSettings


LOCAL_RANK_ARGUMENT = "--local_rank"
"""Argument that DeepSpeed's launcher adds, and programs of DeepSpeed expect."""


def generate(spec: Spec, kind: Kind, placements: Sequence[Placement], *, slots_known: bool) -> Generated:
    """Return what the framework of a job is given.

    Args:
        spec: the spec.
        kind: of the job.
        placements: its workers.
        slots_known: whether their number is known; false as long as `slots: auto` waits for the nodes.

    Raises:
        PlanError: a key of `train:` has no counterpart in the framework, or an argument does not go with the kind.
    """
    usual = ("local_rank",) if kind == "deepspeed" else ()
    added: Sequence[str] = usual if spec.job.add_args is None else spec.job.add_args
    _check(spec, kind, added)
    local_rank = (shell.Late(f"{LOCAL_RANK_ARGUMENT}=${names.LOCAL_RANK}"),) if "local_rank" in added else ()
    framework = {"accelerate": "Accelerate", "deepspeed": "DeepSpeed"}.get(kind)
    if framework is None or not (spec.train is not None or spec.job.deepspeed):
        return Generated(args=local_rank, runtime=framework is None and kind != "command" and spec.train is not None)
    if not slots_known:
        if spec.cluster.transport == "slurm":
            raise PlanError(
                f"what {framework} is given depends on the number of workers, which is unknown with `slots: auto`",
                where=spec.written_at("cluster.slots"),
                hint="give it as a number: `slots: 8`",
            )
        note = f"the settings of {framework} are derived from `train` once the slots are counted"
        return Generated(args=local_rank, notes=(note,))
    slots = {placement.slots for placement in placements}
    per_node = slots.pop() if len(slots) == 1 else 0
    # Few jobs have one of these frameworks, and no job has two.
    from dtctl.plan.frameworks import settings_for

    settings = settings_for(spec, framework, workers=world_size(placements), per_node=per_node)
    if kind == "accelerate":
        from dtctl.plan import accelerate

        return Generated(env=accelerate.variables(settings), args=local_rank)
    return _deepspeed(settings, local_rank, as_argument="deepspeed_config" in added)


def _deepspeed(settings: FrameworkSettings, local_rank: tuple[str, ...], *, as_argument: bool) -> Generated:
    from dtctl.plan import deepspeed

    framework_config = deepspeed.config(settings)
    if not framework_config:
        return Generated(args=local_rank)
    config = (deepspeed.CONFIG_ARGUMENT, deepspeed.as_argument(framework_config)) if as_argument else ()
    return Generated(env={names.DEEPSPEED_CONFIG: deepspeed.as_text(framework_config)}, args=(*local_rank, *config))


def _check(spec: Spec, kind: Kind, added: Sequence[str]) -> None:
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
