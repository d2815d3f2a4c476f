"""Verdict on repeating the steps after a snapshot, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["state", "loss", "gradient", "update"]
CAUSES: Final[Mapping[Kind, str]] = {
    "state": "usually a file of another run, or a load_state_dict that leaves something out",
    "loss": "usually data, code, random numbers, or something that the program counts and `extra_state` does not keep",
    "gradient": "usually the backward pass: its kernels, the number of threads, or the order in which workers add up",
    "update": "usually the optimizer, its settings or the learning rate",
}
"""Kind of the first difference -> its usual cause."""
LATE: Final = "usually a schedule, a score, or something that the program counts and `extra_state` does not keep"
NOT_REPEATED: Final = (
    "its value differs at each computation here: kernels (see train.deterministic), or something that the program "
    "counts or draws and `extra_state` does not keep"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessVerdict:
    """Verdict on repeated steps."""

    verdict: Literal["exact", "not-exact", "not-confirmed"]
    """`not-confirmed` also means that the steps were repeated exactly, but a known difference may show later."""
    step: int
    """Step of the snapshot."""
    steps: int
    """Number of steps that were repeated bit for bit."""
    differs: Kind | None = None
    at: int = 0
    """Step that differs."""
    why: tuple[str, ...] = ()
    has_losses: bool = True
    """True if losses were compared, since each worker had the same samples."""
    losses_to: int = 0
    """Last step whose losses were compared, which may come after the steps with a full record; 0 if none were."""
    repeats: bool | None = None
    """True if the step that differs gave the same result when it was computed once more. None: it was not."""

    @property
    def is_open(self) -> bool:
        """Return whether kernels that do not repeat may be the cause: the first step differs before its update."""
        return self.differs in ("loss", "gradient") and self.at == self.step + 1 and self.repeats is None

    def document(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        return {
            "step": self.step, "verdict": self.verdict, "steps": self.steps, "differs": self.differs,
            "why": list(self.why),
        }  # fmt: skip

    def describe(self) -> str:
        """Return the verdict as a sentence."""
        repeated = f"{_name_steps(self.step + 1, self.step + self.steps)} repeated bit for bit"
        losses = f", and the losses up to step {self.losses_to} are unchanged" if self.losses_to else ""
        known = f"; known to differ: {'; '.join(self.why)}" if self.why else ""
        if self.verdict == "exact":
            return f"exact: {repeated}{losses}"
        if self.verdict == "not-confirmed":
            return f"not confirmed: {f'{repeated}, and yet ' if self.steps else ''}{'; '.join(self.why)}{losses}"
        assert self.differs is not None  # noqa: S101  # for the type checker
        what, cause = self._name_difference(self.differs)
        if self.repeats is False:
            cause = NOT_REPEATED
        elif self.losses_to and self.steps:  # only the losses of later steps differ
            what, cause = f"{repeated}, and {what}", LATE
        return f"not exact: {what} ({cause}){known}"

    def _name_difference(self, kind: Kind) -> tuple[str, str]:
        """Return the name of the difference, and its usual cause."""
        if kind == "state":
            return "the state that was loaded differs from the one that was saved", CAUSES[kind]
        equal = {"loss": "", "gradient": ", its loss is equal", "update": ", its gradient is equal"}[kind]
        if kind == "gradient" and not self.has_losses:
            return f"the gradient of step {self.at} differs", f"{CAUSES['loss']}; workers have other samples now"
        return f"the {kind} of step {self.at} differs{equal}", CAUSES[kind]


def _name_steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
