"""Replacement of a lost worker while the others stay: the part of the workers.

A survivor goes back to the beginning of its step, leaves the group, and waits. The replacement builds all that a worker
has, alone, and waits, too. In the new group the workers that are behind receive the furthest state, and training
continues. A failure that cannot be repaired to the last bit is not healed: the worker reports why, and the launcher
restarts all workers.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
import weakref
import zlib
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dtctl.errors import WorkerFailed
from dtctl.runtime.bits import sum_tensors
from dtctl.runtime.console import say
from dtctl.runtime.distributed.device_mesh import limit_groups
from dtctl.runtime.distributed.worker import Worker, identify
from dtctl.runtime.exactness import randomness
from dtctl.runtime.guards.consistency import fingerprint, require_equal, settings
from dtctl.runtime.live.control import Control, Meeting
from dtctl.runtime.live.training import Training
from dtctl.runtime.live.transfer import IncompleteState, bring_level
from dtctl.runtime.moe.layer import MoE
from dtctl.runtime.snapshot.state import raw
from dtctl.runtime.step import Step

LOST: Final = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL", "socketPollConnect",
    "Connection was likely closed", "connection", "TCPStore", "Timed out waiting", "timed out",
)  # fmt: skip
"""Parts of torch's errors for a collective whose peer is gone."""
JOIN_S: Final = 10.0
"""Seconds for which a worker tries to reach the others, which are all ready by then. Workers that wait for the first
message of one that is lost at this time do not notice the loss sooner. The time doubles when it was too short, since a
machine may be busy."""
BUFFER_BYTES: Final = 64 << 20
"""Most that is looked at to see whether buffers change in training."""


def prepare(trainer: Training) -> None:
    """Listen for lost peers from now on; called before the last exchange before the first step."""
    if trainer.worker.live is not None:
        trainer.worker.live.trains = True


def begin(trainer: Training) -> None:
    """Training begins: note what must not change if a lost worker is to be replaced."""
    if trainer.worker.live is not None:
        trainer.constants = buffers_checksum(trainer)


def before_step(trainer: Training) -> None:
    """Keep what a step may change before it can fail; next to nothing."""
    if trainer.worker.live is not None and trainer.loss_scale is not None:
        trainer.scale_before = trainer.loss_scale.state()


def end(trainer: Training) -> None:
    """Stay until all workers are through and the last snapshot is there: one that is lost before needs the others."""
    if trainer.worker.live is not None:
        trainer.saver.wait()
        trainer.worker.barrier()
        trainer.worker.live.trains = False


def enter(trainer: Training) -> None:
    """Take the place of a lost worker; collective with `heal` of the others.

    Raises:
        WorkerFailed: they do not wait for this one.
    """
    live = trainer.worker.live
    assert live is not None  # noqa: S101  # for the type checker: a replacement has a link
    randomness.begin(trainer.config.seed, trainer.place.stream)
    if not _meet(trainer, live):
        raise WorkerFailed("the others do not wait for the worker that is to take the place of a lost one")


def heal(trainer: Training, error: BaseException) -> bool:
    """Go on after a peer was lost; whether that was done. If not, the error is to be raised.

    Args:
        trainer: as the error left it.
        error: what it met in the midst of a step.
    """
    live = trainer.worker.live
    if live is None:
        return False
    if lost := trainer.feed.lost_readers(error):
        # What this one has read ahead is gone with its reader: another process begins where it stands.
        say(f"a process that reads data died: {lost}; this worker gives way to another one")
        os.kill(os.getpid(), signal.SIGKILL)
    if not (live.is_wanted or is_lost_peer(error)):
        return False
    where = forget_frames(error)
    if _go_back(trainer, live) and _meet(trainer, live):
        return True
    sys.stderr.write(where)
    return False


def require_repeated(before: Step, now: Step, worker: Worker) -> None:
    """See that a step that was interrupted by a loss of a worker comes out with the same losses when it is repeated.

    What a program counts outside of model and optimizer shows here: what the lost worker had of it is lost.

    Args:
        before: the newest passes of this worker.
        now: those after.
        worker: this worker.

    Raises:
        WorkerFailed: a loss is another one.
    """
    if (before.number, before.position, before.batch) != (now.number, now.position, now.batch):
        return
    if worker.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return  # kernels may add up in another order, which is no sign of a fault of the program
    pairs = zip(before.losses, now.losses, strict=False)
    if all(sum_tensors({"loss": one}) == sum_tensors({"loss": other}) for one, other in pairs):
        return
    why = (
        f"step {now.number + 1} has another loss when it is repeated: the program keeps something that snapshots do not"
    )
    if worker.live is not None:
        worker.live.refuse(why)
    raise WorkerFailed(
        why, where="the loss function or the model",
        hint="give what it counts a `state_dict` (docs/guides/snapshots.md), or set `job.recovery: restart`",
    )  # fmt: skip


def _go_back(trainer: Training, live: Control) -> bool:
    """Go back to the beginning of the step; return whether nothing is left of the process group."""
    wrapped = weakref.ref(trainer.strategy.module)
    trainer.let_go()
    gc.collect()  # what the traceback held makes cycles, and with them the hooks of the old wrapper would live on
    if trainer.loss_scale is not None:
        trainer.loss_scale.load(trainer.scale_before)
    if wrapped() is not None and wrapped() is not trainer.model:
        live.refuse("the program keeps the wrapped model")
        return False
    return True


def _meet(trainer: Training, live: Control) -> bool:
    """Come together with the others, again if one is lost while they do; whether it was done."""
    limit_s = JOIN_S
    while True:
        meeting = live.meet(-1 if live.newcomer else trainer.step, lambda: obstacle(trainer))
        if meeting is None:
            return False
        try:
            repeats = _join(trainer, live, meeting, limit_s)
        except IncompleteState as exc:
            live.refuse(f"nobody is left who has {exc}")
            return False
        except Exception as exc:
            if not (live.is_wanted or is_lost_peer(exc)):
                raise
            forget_frames(exc)
            if not live.is_wanted:  # no loss of a worker is known
                live.report("failed")
                limit_s *= 2
        else:
            live.report("joined", step=trainer.step, repeats=repeats)
            return True
        trainer.let_go()
        gc.collect()


def _join(trainer: Training, live: Control, meeting: Meeting, limit_s: float) -> bool:
    """Make the group of an epoch, and bring all workers to one state; return whether this one repeats part of a step.

    Args:
        trainer: at the beginning of its step, without a group.
        live: link to the supervisor.
        meeting: where the others are.
        limit_s: for how long each step of making the group may take.

    Raises:
        RuntimeError: another worker was lost meanwhile.
    """
    leave()
    live.joining(meeting.epoch)
    worker, own = trainer.worker, identify(os.environ)
    store = live.store_of(meeting)
    limit = timedelta(seconds=limit_s)
    if store is None:
        store = TCPStore(meeting.address, meeting.port, worker.world_size, is_master=False, timeout=limit)
    dist.init_process_group(
        own.backend,
        store=PrefixStore(f"epoch-{meeting.epoch}", store),
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=limit,
    )
    if not live.is_joined():
        raise RuntimeError("another worker was lost: connection given up")
    limit_groups(trainer.config.timeout_s)
    worker.take_place(own.backend)
    degrees = trainer.place.degrees
    require_equal(settings(trainer.config), worker)
    require_equal(fingerprint(trainer.model, degrees, samples=trainer.samples, steps=trainer.config.steps or 0), worker)
    is_divided = degrees.shards > 1
    if is_divided:  # before a worker can be given its part
        trainer.spread_again()
    repeats = bring_level(trainer, is_newcomer=live.newcomer)
    if live.newcomer:
        live.newcomer = False
        begin(trainer)
    if not is_divided:  # the pass that is thrown away needs the state
        trainer.spread_again()
    return repeats


def leave() -> None:
    """Leave the group after its connections are gone, or after it could not be made."""
    if not dist.is_initialized():
        # torch counts groups to name them, and one that failed has counted (2.13). If only some workers have come that
        # far, they would look for each other under different names, in all later attempts.
        dist.distributed_c10d._world.group_count = 0
        return
    if "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def obstacle(trainer: Training) -> str:
    """Return why this worker's state cannot be put right without a snapshot; empty if it can.

    What a lost worker had of its own is lost with it, and what a step has changed outside of parameters cannot be
    taken back: so there must be neither.
    """
    live = trainer.worker.live
    assert live is not None  # noqa: S101  # for the type checker
    if live.newcomer:
        return ""
    return _obstacle_in_settings(trainer) or _obstacle_in_state(trainer)


def _obstacle_in_settings(trainer: Training) -> str:
    degrees, config = trainer.place.degrees, trainer.config
    is_divided = degrees.shards > 1
    if not degrees.has_replicas or trainer.elastic or config.strategy == "zero1":
        return "there are no replicas of each part of the state that could be put into new process groups"
    if is_divided and not hasattr(trainer.model, "reset_iter_state"):  # since 2.13
        return f"torch {torch.__version__} cannot take back an interrupted pass of a sharded model"
    if config.snapshot.memory is not None:
        return "all workers write the snapshots in memory together"
    if config.shares:
        return "which share a worker takes is agreed on when all start"
    if config.snapshot.replicas or (trainer.saver.collective and not is_divided):
        return "all workers write the snapshots together"
    if config.ddp.comm_hook == "powersgd":
        return "PowerSGD carries over what it left out, on each worker its own"
    return ""


def _obstacle_in_state(trainer: Training) -> str:
    live = trainer.worker.live
    if trainer.is_torn or takes_whole_steps(trainer.optimizer):
        return "it was about to go back to a snapshot, or its optimizer exchanges something in its step"
    if live is not None and live.has_own_groups():
        return "the program has process groups of its own, which cannot be made anew for it"
    if trainer.extra_state or trainer.hooks:
        return "the program has `extra_state` or hooks, which may be another on each worker"
    if trainer.constants is None or buffers_checksum(trainer) != trainer.constants:
        return "the model's buffers change in training, and those of the lost worker are lost"
    changed, lost = trainer.account.program.changed()
    own = [path for path in [*changed, *lost] if not path.startswith("optimizer.")]
    if own:
        return f"{own[0]} changes in training, by what its worker has seen"
    if trainer.feed.reader.at_once is not None and not _is_untouched(trainer):
        return "the program draws from Python's or NumPy's random numbers, and how far the lost worker was is not known"
    return ""


def takes_whole_steps(optimizer: object) -> bool:
    """Return whether an optimizer was found to need whole matrices; see strategies.whole_steps."""
    return hasattr(type(optimizer), "_dtctl_dependent")


def buffers_checksum(trainer: Training) -> int | None:
    """Return one number for all buffers of the model; None if they are too large to be looked at.

    Without those that are part of a step, the same on all workers and given to newcomers: biases that balance experts.
    """
    balancing = {layer.bias for layer in trainer.model.modules() if isinstance(layer, MoE)}
    buffers = [buffer for buffer in trainer.model.buffers() if buffer not in balancing]
    if sum(buffer.numel() * buffer.element_size() for buffer in buffers) > BUFFER_BYTES:
        return None
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(raw(buffer).numpy().data, crc) if buffer.numel() else crc
    return crc


def _is_untouched(trainer: Training) -> bool:
    """Return whether no number was drawn from Python's and NumPy's generators since training began."""
    device = trainer.worker.device
    now = randomness.capture(device)
    randomness.begin(trainer.config.seed, trainer.place.stream)
    fresh = randomness.capture(device)
    randomness.restore({name: tensor.clone() for name, tensor in now.items()}, device)
    return all(torch.equal(now[name], fresh[name]) for name in ("python", "numpy"))


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error may mean that a peer is gone."""
    return any(isinstance(each, RuntimeError) and _says_lost(each) for each in _chain(error))


def _says_lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and all that led to it."""
    found = [error]
    for each in found:
        found += [other for other in (each.__cause__, each.__context__) if other is not None and other not in found]
    return found


def forget_frames(error: BaseException) -> str:
    """Release the local variables in the frames of an error: passes, and through them the wrapped model.

    A cleared frame still has its function, and a nested function still has its closure, such as the module whose
    forward pass has failed.

    Returns:
        The error with its traceback, as text.
    """
    text = "".join(traceback.format_exception(error))
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    return text
