"""How the loop's state becomes a snapshot: whole, by rank 0, or in pieces, by everyone (`train.snapshot.layout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from dtctl import names
from dtctl.errors import DtctlError, SnapshotError, WorkerFailed
from dtctl.runtime import randomness, resume
from dtctl.runtime.account import EVERYONE, checksum
from dtctl.runtime.console import complain
from dtctl.runtime.program_state import some_of
from dtctl.runtime.snapshot import state
from dtctl.runtime.snapshot.pieces import Key
from dtctl.runtime.snapshot.place import Place, Remote, place
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.share import gathered_json
from dtctl.runtime.snapshot.stores import stores
from dtctl.runtime.snapshot.whole import gathered, gathered_optimizer
from dtctl.runtime.worker import Worker
from dtctl.train.config import SnapshotConfig

if TYPE_CHECKING:
    from dtctl.runtime.loop import Trainer


def folder(config: SnapshotConfig, environ: Mapping[str, str]) -> Place:
    """Where the snapshots of a run lie.

    Raises:
        SpecError: at a URL of a kind that is not known, or with a password in it.
        SnapshotError: at a URL for which a package is missing.
    """
    return place(config.dir or environ.get(names.SNAPSHOT_DIR) or "snapshots")


def saver(config: SnapshotConfig, folder: Place, worker: Worker, model: nn.Module, *, spread: bool) -> Saver:
    """What writes the snapshots of a training; collective over all workers.

    Args:
        config: when and where.
        folder: of the snapshots.
        worker: this worker.
        model: as this worker has it.
        spread: whether workers have state that rank 0 lacks.

    Raises:
        SnapshotError: at a URL that a worker cannot write or see, of which training should hear before its first step.
    """
    in_pieces = spread if config.layout == "auto" else config.layout == "sharded"
    replicas = config.replicas
    if isinstance(folder, Remote):
        stores(folder, worker)
        replicas = 0  # there is one store, and it keeps copies if anybody does
    if worker.backend is None or not (in_pieces or replicas):
        return Saver(
            folder,
            keep=config.keep,
            keep_every_s=config.keep_every_s,
            when_busy=config.when_busy,
            max_failed=config.max_failed_saves,
            complain=complain,
            committed=resume.marker(folder),
        )
    # Its process group costs a few milliseconds, which others should not pay.
    from dtctl.runtime.snapshot.together import Together

    trained = {name for name, _ in model.named_parameters()}

    def firsts(key: Key) -> bool:
        """Buffers: running means are of each worker's own samples, and the first one's count."""
        return key[0] == "model" and key[1] not in trained

    return Together(
        folder,
        worker,
        keep=config.keep,
        keep_every_s=config.keep_every_s,
        spread=in_pieces,
        replicas=replicas,
        firsts=firsts,
        when_busy=config.when_busy,
        max_failed=config.max_failed_saves,
        committed=resume.marker(folder) if worker.local_rank == 0 else lambda _: None,
    )


def begin(saver: Saver, worker: Worker) -> None:
    """Take the folder for this run; collective over all workers.

    Raises:
        SnapshotError: on every worker, if another run writes there, or nobody can.
    """
    error = None
    if saver.together:
        saver.open()
        return
    if worker.is_first:
        try:
            saver.open()
        except DtctlError as exc:
            error = {"message": exc.message, "where": exc.where, "hint": exc.hint}
    told = gathered_json(error, worker)[0]
    if told is not None:
        raise SnapshotError(told["message"], where=told["where"], hint=told["hint"])


def save(trainer: Trainer, *, needed: bool) -> None:
    """Begin a snapshot of this step; collective over all workers."""
    worker, saver = trainer.worker, trainer.saver
    together, in_pieces = saver.together, saver.spread
    everyone = randomness.gather(worker)
    local, lost = _local(trainer, in_pieces=in_pieces)
    parts = _own(trainer) if in_pieces else _whole(trainer)
    parts |= {"local": local} if local else {}
    if worker.is_first:
        parts["random"] = everyone
        trainer.account.look_at_code()
        parts["circumstances"] = {"detail": trainer.account.text}
    unkept = [f"{some_of(lost)} changes in training, and snapshots do not keep it"] if lost else []
    facts = {"position": trainer.position, "circumstances": trainer.circumstances} | {
        "programs": trainer.account.checksums,
        "irreproducible": trainer.account.irreproducible + unkept,
        "batch": resume.sizes(trainer.asked, trainer.batch),
        "rate_factor": trainer.rate_factor,
        "late": [name for name in trainer.model.state_dict() if name not in trainer.account.names],
        "chosen": trainer.settled.kept,
        "best": trainer.best and trainer.best.state(),
        "loss_scale": trainer.loss_scale and trainer.loss_scale.state(),
    }
    if worker.is_first or together:
        best = trainer.best.steps if trainer.best else ()
        saver.save(trainer.step, parts, facts=facts, best=best, needed=needed)


def _local(trainer: Trainer, *, in_pieces: bool) -> tuple[dict[str, Any], list[str]]:
    """What the program keeps beside model and optimizer, once if all workers have the same; collective.

    Returns:
        What this worker gives to the snapshot, and the paths of what cannot be kept, on any.
    """
    worker = trainer.worker
    if trainer.shards is not None:
        trainer.account.require_elastic()
    mine, lost = trainer.account.local()
    groups = [
        {key: checksum(value) for key, value in state.group_values(group).items()} if group["params"] else None
        for group in trainer.optimizer.param_groups
    ]
    told = gathered_json([checksum(mine) if mine else None, lost, groups], worker)
    _require_alike([rows for _, _, rows in told], trainer.strategy.name)
    everywhere = list(dict.fromkeys(path for _, paths, _ in told for path in paths))
    if all(one is None for one, _, _ in told):
        return {}, everywhere
    if all(one == told[0][0] for one, _, _ in told):
        return ({EVERYONE: mine} if worker.is_first else {}), everywhere
    own = {str(worker.rank): mine}
    return (own if in_pieces else gathered(own, worker) or {}), everywhere


def _require_alike(told: list[list[dict[str, int] | None]], strategy: str) -> None:
    """See that what the optimizer counts for its groups is the same on all workers, of which each may have a part.

    Raises:
        WorkerFailed: on every worker, if it is not.
    """
    if len({len(groups) for groups in told}) > 1:  # stages of a pipeline, whose tensors lie on several meshes
        return
    for number, row in enumerate(zip(*told, strict=True)):
        there = [values for values in row if values is not None]
        for key in there[0] if there else ():
            if len({values.get(key) for values in there}) > 1:
                raise WorkerFailed(
                    f"the workers' optimizers have come apart: param_groups[{number}] has another `{key}` on each",
                    where=f"train.strategy ({strategy})",
                    hint="an optimizer that counts over all parameters needs all of them on each worker: use ddp",
                )


def _own(trainer: Trainer) -> dict[str, Any]:
    """What this worker has."""
    tree = state.optimizer_tree(trainer.model, trainer.optimizer, trainer.configured)
    if any(True for _ in state.tensors(tree["groups"])):
        raise SnapshotError(
            "the optimizer has large tensors in param_groups, which workers cannot share the writing of",
            where="train.snapshot.layout",
            hint="use `layout: whole`",
        )
    parts: dict[str, Any] = {"model": dict(trainer.model.state_dict()), "optimizer": tree}
    if trainer.ema is not None:
        parts["ema"] = trainer.ema.state()
    if own := trainer.strategy.state():
        parts["strategy"] = {str(trainer.worker.rank): own}
    return parts


def _whole(trainer: Trainer) -> dict[str, Any]:
    """Everything on rank 0, and nothing elsewhere; collective over all workers."""
    worker, spread, tree = trainer.worker, trainer.strategy.spread, dict[str, Any]()
    if spread or worker.is_first:
        tree = state.optimizer_tree(trainer.model, trainer.optimizer, trainer.configured)
    parts: dict[str, Any] = {
        "model": weights(trainer),
        "optimizer": gathered_optimizer(tree, worker) if spread else tree,
    }
    own = trainer.strategy.state()
    others = gathered({str(worker.rank): own}, worker) if own else None
    if trainer.ema is not None:
        average = trainer.ema.state()
        parts["ema"] = gathered(average, worker) if spread else average
    parts |= {"strategy": others} if others else {}
    return parts if worker.is_first else {}


def weights(trainer: Trainer) -> dict[str, Any]:
    """The whole model's state on rank 0, whatever the strategy; empty elsewhere. Collective over all workers."""
    spread, worker = trainer.strategy.spread, trainer.worker
    own = dict(trainer.model.state_dict()) if spread or worker.is_first else {}
    return (gathered(own, worker) or {}) if spread else own
