"""Replacement of a lost worker while the others stay: the actions of the workers.

A survivor goes back to the beginning of its step, leaves the group, and waits. The replacement builds the parts of a
worker alone, and waits, too. In the new group, workers that are behind receive the most advanced state, and training
continues. If a worker cannot be restored to the last bit, it reports the reason, and the launcher restarts all workers.
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
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from dtctl.errors import WorkerFailed
from dtctl.runtime import randomness
from dtctl.runtime.console import say
from dtctl.runtime.distributed.device_mesh import limit_groups
from dtctl.runtime.distributed.worker import resolve_worker_from_env
from dtctl.runtime.guards.consistency import build_training_fingerprint, compute_settings_checksum, require_equal_facts
from dtctl.runtime.live.control import RendezvousPoint, SupervisorLink
from dtctl.runtime.live.transfer import IncompleteState, bring_level
from dtctl.runtime.moe.layer import MoE
from dtctl.runtime.optim import replace_optimizer_parameters
from dtctl.runtime.restore import warm_up
from dtctl.runtime.snapshot.state import view_tensor_bytes
from dtctl.runtime.training import Training

LOST: Final = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL", "socketPollConnect",
    "Connection was likely closed", "connection", "TCPStore", "Timed out waiting", "timed out",
)  # fmt: skip
"""Phrases in torch's errors for a collective whose peer has ended."""
JOIN_S: Final = 10.0
"""Seconds for which a worker tries to reach the others, which are all ready at this time. Workers that wait for the
first message of a worker that is lost meanwhile do not notice the loss sooner. The time doubles if it was too short,
since a machine may be busy."""
BUFFER_BYTES: Final = 64 << 20
"""Largest size of buffers that are checked for changes during training."""


def listen_for_lost_peers(training: Training) -> None:
    """Take part in replacements from now on; called before the last exchange that precedes the first step."""
    if training.settings.worker.live is not None:
        training.settings.worker.live.trains = True


def record_buffers_checksum(training: Training) -> None:
    """Record a checksum of the buffers when training begins, since they must not change if a worker is replaced."""
    if training.settings.worker.live is not None:
        training.transaction.constants = compute_buffers_checksum(training.trained.model)


def keep_small_state(training: Training) -> None:
    """Keep the small state that a step may change before it can fail."""
    if training.settings.worker.live is not None and training.trained.loss_scale is not None:
        training.transaction.scale_before = training.trained.loss_scale.state()


def wait_for_all_workers(training: Training) -> None:
    """Wait until all workers have finished and the last snapshot is written.

    A worker that is lost before this point needs the others.
    """
    if training.settings.worker.live is not None:
        training.snapshots.saver.wait()
        training.settings.worker.barrier()
        training.settings.worker.live.trains = False


def join_as_replacement(training: Training) -> None:
    """Take the place of a lost worker; collective with `recover_from_lost_peer` of the others.

    Raises:
        WorkerFailed: the other workers do not wait for this one.
    """
    live = training.settings.worker.live
    assert live is not None  # noqa: S101  # for the type checker: a replacement has a link
    randomness.seed_worker_generators(training.settings.config.seed, training.settings.place.stream)
    if not _rejoin_with_retries(training, live):
        raise WorkerFailed("the others do not wait for the worker that is to take the place of a lost one")


def recover_from_lost_peer(training: Training, error: BaseException) -> bool:
    """Replace a lost peer; return True if training can continue. Otherwise the caller must raise the error.

    Args:
        training: the run in the state in which the error left it.
        error: error during a step.
    """
    live = training.settings.worker.live
    if live is None:
        return False
    if lost := training.engine.feed.describe_lost_readers(error):
        # The batches read ahead are lost with their reader, so another process must begin at this position.
        say(f"a process that reads data died: {lost}; this worker will be replaced")
        os.kill(os.getpid(), signal.SIGKILL)
    if not (live.is_wanted or is_lost_peer(error)):
        return False
    where = forget_frames(error)
    if _go_back(training, live) and _rejoin_with_retries(training, live):
        return True
    sys.stderr.write(where)
    return False


def _go_back(training: Training, live: SupervisorLink) -> bool:
    """Go back to the beginning of the step; return False if the program keeps parts of the old process group."""
    wrapped = weakref.ref(training.engine.strategy.module)
    _detach_model(training)
    gc.collect()  # frees cycles through the traceback, which would keep the hooks of the old wrapper alive
    if training.trained.loss_scale is not None:
        training.trained.loss_scale.load(training.transaction.scale_before)
    if wrapped() is not None and wrapped() is not training.trained.model:
        live.report("unable", why="the program keeps the wrapped model")
        return False
    return True


def _rejoin_with_retries(training: Training, live: SupervisorLink) -> bool:
    """Join the other workers, once more if another one is lost meanwhile; return False if that is not possible."""
    limit_s = JOIN_S
    while True:
        meeting = live.wait_for_meeting(
            -1 if live.newcomer else training.position.step, lambda: find_recovery_obstacle(training)
        )
        if meeting is None:
            return False
        try:
            repeats = _join_epoch_group(training, live, meeting, limit_s)
        except IncompleteState as exc:
            live.report("unable", why=f"no worker is left that has {exc}")
            return False
        except Exception as exc:
            if not (live.is_wanted or is_lost_peer(exc)):
                raise
            forget_frames(exc)
            if not live.is_wanted:  # the loss of a worker has not been announced
                reason = (str(exc).splitlines() or [type(exc).__name__])[0]
                say(f"could not connect to the other workers within {limit_s:g} s, tries again: {reason}")
                live.report("failed")
                limit_s *= 2
        else:
            live.report("joined", step=training.position.step, repeats=repeats)
            return True
        _detach_model(training)
        gc.collect()


def _join_epoch_group(training: Training, live: SupervisorLink, meeting: RendezvousPoint, limit_s: float) -> bool:
    """Make the group of an epoch, and bring all workers to one state; return whether this one repeats a step.

    Args:
        training: the run at the beginning of its step, without a group.
        live: link to the supervisor.
        meeting: meeting point of the workers.
        limit_s: time limit in seconds for each step of making the group.

    Raises:
        RuntimeError: another worker was lost meanwhile.
    """
    destroy_broken_group()
    live.joining(meeting.epoch)
    settings, own = training.settings, resolve_worker_from_env(os.environ)
    worker = settings.worker
    store = live.get_hosted_store(meeting)
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
        raise RuntimeError("another worker was lost: the connection was closed")
    limit_groups(settings.config.timeout_s)
    worker.complete_join(own.backend)
    degrees = settings.place.degrees
    require_equal_facts(compute_settings_checksum(settings.config), worker)
    facts = build_training_fingerprint(
        training.trained.model, degrees, samples=settings.samples, steps=settings.config.steps or 0
    )
    require_equal_facts(facts, worker)
    is_divided = degrees.shards > 1
    if is_divided:  # a worker can receive its part only after that
        _reshard_training(training)
    repeats = bring_level(training, is_newcomer=live.newcomer)
    if live.newcomer:
        live.newcomer = False
        record_buffers_checksum(training)
    if not is_divided:  # the discarded pass needs the state
        _reshard_training(training)
    return repeats


def _detach_model(training: Training) -> None:
    """Unwrap the model, before the process group is left."""
    training.engine.detach_model()
    if training.agreement is not None:
        training.agreement.drop_pending_answer()
    if training.transaction.ready is None:
        training.trained.drop_gradients()


def _reshard_training(training: Training) -> None:
    """Divide the model over the new process group, as at the start of an attempt; collective."""
    engine, trained, position = training.engine, training.trained, training.position
    before, whole = engine.strategy, dict(trained.model.named_parameters())
    if engine.reshard_model(position.batch):
        replace_optimizer_parameters(trained.optimizer, whole, dict(trained.model.named_parameters()))
        trained.take_parameters(engine.strategy, trained.rate.own, position.steps)
        training.retake_account()
    elif engine.strategy is not before:
        engine.strategy.prepare(trained.optimizer)
    engine.watch_strategy()
    training.check.stop_comparison(f"a worker was replaced in step {position.step + 1}")
    if training.frozen is not None:
        training.frozen.record()
    training.snapshots.rejoin(sharded_state=engine.strategy.sharded_state)
    training.account.program.load(warm_up(training))


def destroy_broken_group() -> None:
    """Leave the group after its connections were lost, or after it could not be made."""
    if not dist.is_initialized():
        # torch numbers groups to name them, and counts a group that failed (2.13). If only some workers got that far,
        # their names would differ in all later attempts.
        dist.distributed_c10d._world.group_count = 0
        return
    if "nccl" in str(dist.get_backend_config()):
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def find_recovery_obstacle(training: Training) -> str:
    """Return the reason why this worker's state cannot be restored without a snapshot; empty if it can.

    State that only the lost worker had is gone, and changes of a step outside of parameters cannot be taken back.
    Therefore neither may exist.
    """
    live = training.settings.worker.live
    assert live is not None  # noqa: S101  # for the type checker
    if live.newcomer:
        return ""
    return _obstacle_in_settings(training) or _obstacle_in_state(training)


def _obstacle_in_settings(training: Training) -> str:
    degrees, config = training.settings.place.degrees, training.settings.config
    is_divided = degrees.shards > 1
    if not degrees.has_replicas or training.settings.is_elastic or config.strategy == "zero1":
        return "there are no replicas of each part of the state that could be put into new process groups"
    if is_divided and not hasattr(training.trained.model, "reset_iter_state"):  # exists since 2.13
        return f"torch {torch.__version__} cannot take back an interrupted pass of a sharded model"
    if config.snapshot.memory is not None:
        return "all workers write the snapshots in memory together"
    if config.shares:
        return "which share a worker takes is agreed on when all start"
    if config.snapshot.replicas or (training.snapshots.saver.collective and not is_divided):
        return "all workers write the snapshots together"
    if config.ddp.comm_hook == "powersgd":
        return "PowerSGD carries over what it left out, on each worker its own"
    return ""


def _obstacle_in_state(training: Training) -> str:
    live = training.settings.worker.live
    if training.transaction.is_torn or takes_whole_steps(training.trained.optimizer):
        return "it was about to go back to a snapshot, or its optimizer exchanges something in its step"
    if live is not None and live.has_own_groups():
        return "the program has process groups of its own, which cannot be made anew for it"
    if training.extra_state or training.hooks:
        return "the program has `extra_state` or hooks, which may be another on each worker"
    constants = training.transaction.constants
    if constants is None or compute_buffers_checksum(training.trained.model) != constants:
        return "the model's buffers change in training, and those of the lost worker are lost"
    changed, lost = training.account.program.changed()
    own = [path for path in [*changed, *lost] if not path.startswith("optimizer.")]
    if own:
        return f"{own[0]} changes in training, depending on the samples of its worker"
    if training.engine.feed.reader.at_once is not None and not _is_untouched(training):
        return "the program draws from Python's or NumPy's random numbers, and how far the lost worker was is not known"
    return ""


def takes_whole_steps(optimizer: object) -> bool:
    """Return whether an optimizer needs whole matrices according to strategies.whole_steps."""
    return hasattr(type(optimizer), "_dtctl_dependent")


def compute_buffers_checksum(model: nn.Module) -> int | None:
    """Return a checksum of the model's buffers; None if they are too large.

    Biases that balance experts are left out: they are part of a step, equal on all workers, and sent to replacements.
    """
    balancing = {layer.bias for layer in model.modules() if isinstance(layer, MoE)}
    buffers = [buffer for buffer in model.buffers() if buffer not in balancing]
    if sum(buffer.numel() * buffer.element_size() for buffer in buffers) > BUFFER_BYTES:
        return None
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(view_tensor_bytes(buffer).numpy().data, crc) if buffer.numel() else crc
    return crc


def _is_untouched(training: Training) -> bool:
    """Return whether nothing was drawn from Python's and NumPy's generators since training began."""
    device = training.settings.worker.device
    now = randomness.capture_rng_states(device)
    randomness.seed_worker_generators(training.settings.config.seed, training.settings.place.stream)
    fresh = randomness.capture_rng_states(device)
    randomness.restore_rng_states({name: tensor.clone() for name, tensor in now.items()}, device)
    return all(torch.equal(now[name], fresh[name]) for name in ("python", "numpy"))


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error may mean that a peer has ended."""
    return any(isinstance(each, RuntimeError) and _says_lost(each) for each in _list_error_chain(error))


def _says_lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)


def _list_error_chain(error: BaseException) -> list[BaseException]:
    """Return an error and all of its causes."""
    found = [error]
    for each in found:
        found += [other for other in (each.__cause__, each.__context__) if other is not None and other not in found]
    return found


def forget_frames(error: BaseException) -> str:
    """Clear the local variables in the frames of an error: passes, and through them the wrapped model.

    A cleared frame still refers to its function, and a nested function to its closure, such as the module whose forward
    pass has failed.

    Returns:
        The error with its traceback, as text.
    """
    text = "".join(traceback.format_exception(error))
    for each in _list_error_chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    return text
