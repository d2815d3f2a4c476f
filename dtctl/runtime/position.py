"""Position of a run in steps and samples, and the batches from there on."""

from __future__ import annotations

from dtctl.runtime.data_loading.order import SampleOrder, SequentialOrder, WorkerSampler
from dtctl.train.batch import BatchSizes, compute_training_length
from dtctl.train.config import TrainConfig


class TrainingPosition:
    """Position of one run, the same on all workers.

    Attributes:
        step: number of optimizer steps done.
        steps: number of steps of the run.
        samples: number of samples consumed, over all workers and attempts.
        began_at: step after which this attempt began.
        asked: configured sizes of a batch.
        batch: present sizes of a batch, with smaller passes if memory has run out.
        schedule: samples of this worker from here on.
        is_ended: True if a hook has ended the run before its last step.
    """

    def __init__(self, config: TrainConfig, asked: BatchSizes, *, samples: int, in_order: bool, rank: int) -> None:
        """Start at step 0.

        Args:
            config: settings of the run.
            asked: configured sizes of a batch.
            samples: size of the data set.
            in_order: True if samples are read in their original order, False if in a random order.
            rank: number of this worker among those with different samples.

        Raises:
            PlanError: the data set has fewer samples than a step needs, or it is endless and the run counts epochs.
        """
        self.asked = self.batch = asked
        self.steps, self._end = compute_training_length(config, samples=samples, batch=asked)
        self.step = self.samples = self.began_at = 0
        self.is_ended = False
        self._counts_steps = config.steps is not None
        self._order = SequentialOrder() if in_order else SampleOrder(samples, config.seed)
        self._rank = rank
        self.schedule = self._build_schedule()

    def _build_schedule(self) -> WorkerSampler:
        return WorkerSampler(self._order, self.batch, rank=self._rank, end=self._end)

    @property
    def next_samples(self) -> int:
        """Return the number of samples in the next step, over all workers; fewer than a batch at the end."""
        return self.schedule.samples(self.samples)

    def set_batch_sizes(self, sizes: BatchSizes) -> None:
        """Use other batch sizes from here on; if the run counts epochs, its number of steps changes with them."""
        self.batch = sizes
        if self._counts_steps:
            self._end = self.samples + (self.steps - self.step) * sizes.total
        else:
            self.steps = self.step - (self.samples - self._end) // sizes.total
        self.schedule = self._build_schedule()

    def advance(self) -> None:
        """Count a completed step."""
        self.samples += self.schedule.samples(self.samples)
        self.step += 1

    def end(self) -> None:
        """Make the newest step the last one of the run."""
        self.is_ended, self.steps = True, self.step
