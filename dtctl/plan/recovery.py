"""Cost of a lost worker: it is replaced while the others stay, or all are started again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtctl.errors import PlanError
from dtctl.plan.model import Kind
from dtctl.spec.model import Spec
from dtctl.train.mesh import resolve_degrees


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Plan for the loss of a worker."""

    live: bool
    """True if it is replaced while the others stay."""
    note: str
    """Cost of a loss in words; empty for a job without dtctl.runtime."""


def resolve_recovery(spec: Spec, kind: Kind, *, workers: int, has_own_loop: bool = False) -> RecoveryPlan:
    """Resolve `job.recovery`. The workers check further: their program's state decides, too.

    Args:
        spec: the checked spec.
        kind: of the job.
        workers: number of workers.
        has_own_loop: True if the script imports `dtctl.runtime.session`.

    Raises:
        PlanError: the spec requests that lost workers are replaced, and this kind of run does not support it.
    """
    why, hint = _find_live_recovery_obstacle(spec, kind, workers=workers)
    own_loop = f"{spec.job.script} has a loop of its own (dtctl.runtime.session)" if has_own_loop else ""
    wanted = spec.job.recovery
    if wanted == "restart" or (wanted == "auto" and (why or not spec.job.max_restarts)):
        trains = (spec.train is not None or has_own_loop) and workers > 1 and kind in ("direct", "torchrun")
        # In plain mode, list_warnings reports this for every job, with or without training.
        note = _restart_note(spec, own_loop or why, workers) if trains and not spec.is_plain else ""
        return RecoveryPlan(live=False, note=note)
    if why:
        raise PlanError(f"lost workers cannot be replaced: {why}", where="job.recovery", hint=hint)
    if own_loop:  # the session tells this to the launcher when it begins, which then restarts all
        return RecoveryPlan(live=True, note=_restart_note(spec, own_loop, workers))
    return RecoveryPlan(
        live=True,
        note="a lost worker is replaced while the others stay, and costs the step in progress "
        f"(job.recovery: {wanted}); if that cannot be exact, the workers report it, and all are restarted",
    )


def _restart_note(spec: Spec, obstacle: str, workers: int) -> str:
    cost = f"a restart of all {workers} workers and the steps since the newest snapshot"
    text = (
        f"a lost worker costs {cost}" if spec.job.max_restarts else "a lost worker ends the run (job.max_restarts is 0)"
    )
    if spec.job.recovery == "restart":
        return f"{text} (job.recovery: restart)"
    return f"{text}; " + (
        f"it cannot be replaced alone, since {obstacle}"
        if obstacle
        else "`job.recovery: live`, or a higher `job.max_restarts`, replaces it alone"
    )


def _find_live_recovery_obstacle(spec: Spec, kind: Kind, *, workers: int) -> tuple[str, str]:
    """Return why not, and what to do about it; empty if it can be done."""
    train = spec.settings
    if spec.is_plain:
        why = f"nothing in the job watches the workers: {spec.plain_reason}"
        return why, "leave it out, or use `recovery: restart`"
    if kind != "direct":
        return f"kind {kind} starts all workers of a node together", "use `job.kind: direct`, or `recovery: restart`"
    if spec.train is None:
        return (
            "the job does not train with dtctl.runtime",
            "give the spec a section `train`, or use `recovery: restart`",
        )
    if workers == 1:
        return "there is one worker, so no other has its state", "use `recovery: restart`"
    if train.get("shares"):
        return (
            "the workers agree on their shares only when all start",
            "leave `train.shares` out, or use `recovery: restart`",
        )
    if train.get("snapshot", {}).get("memory") is not None:
        return "all workers write the snapshots in memory together", "use `recovery: restart`, or leave `memory` out"
    if why := _held_once(train.get("strategy", "auto"), workers):
        return (
            why,
            "use `train.strategy: ddp`, `hsdp` or degrees with replicas, such as {dp: 2, ep: -1}, or `recovery: "
            "restart`",
        )
    if train.get("exact") == "elastic":
        return "`train.exact: elastic` keeps state of its own on each worker", "use `recovery: restart`"
    if train.get("snapshot", {}).get("replicas"):
        return "all workers write the snapshots together (train.snapshot.replicas)", "use `recovery: restart`"
    return "", ""


def _held_once(strategy: str | Mapping[str, int], workers: int) -> str:
    """Return the part of a worker's state that no other one has; only the workers can resolve `auto`."""
    if strategy in ("auto", "ddp", "hsdp"):
        return ""
    if strategy == "zero1":
        return "zero1 divides the optimizer's state, and no other worker has a lost worker's part"
    if isinstance(strategy, str):
        return f"with strategy {strategy} a part of the state is nowhere else"
    degrees = resolve_degrees(strategy, workers=workers, per_node=0)
    if degrees.has_replicas:
        return ""
    if degrees.tp * degrees.cp * degrees.pp > 1:
        return f"a model that is divided by tp, cp or pp ({degrees}) cannot be put into new process groups"
    held = "experts" if degrees.ep > 1 else "shards"
    return f"{degrees} is a single replica, so no other worker has a lost worker's {held}"
