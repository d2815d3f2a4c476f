"""The one thing that training stops for: a copy of the state into memory that is used again for each snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtctl.runtime.snapshot import headers, packing


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One part, ready to be written."""

    name: str
    """Of the part."""
    outline: packing.Outline
    data: torch.Tensor
    """uint8, a stretch of the staging buffer."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The state of a step as it was; valid until the staging is used again."""

    files: tuple[StagedFile, ...]
    arrived: torch.cuda.Event | None
    """When copies from the GPU are through; None if there are none on the way."""

    def wait(self) -> None:
        """Return when all bytes are there."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Staging:
    """A buffer as large as the largest state so far; pinned when the state comes from a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[packing.Slot, ...]] = []
        self._views: list[torch.Tensor] = []

    def take(self, parts: Mapping[str, Any]) -> Staged:
        """Copy all tensors. Copies from a GPU are only begun: what is computed there later comes after them.

        Args:
            parts: name -> tensors and plain values, as `packing.outline` takes them.

        Raises:
            SnapshotError: a tensor or a key is of a kind that snapshots do not keep.
        """
        outlines, sources = [], []
        for part in parts.values():
            found, tensors = packing.outline(part)
            outlines.append(found)
            sources += tensors
        begins, size_bytes = [], 0
        for found in outlines:
            begins.append(size_bytes)
            size_bytes += found.size_bytes + -found.size_bytes % headers.ALIGNMENT
        device = next((tensor.device for tensor in sources if tensor.device.type == "cuda"), None)
        self._prepare(outlines, begins, size_bytes, pinned=device is not None)
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=device is not None)
        arrived = None
        if device is not None:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(device))
        files = (
            StagedFile(name, found, self._buffer[begin : begin + found.size_bytes])
            for name, found, begin in zip(parts, outlines, begins, strict=True)
        )
        return Staged(tuple(files), arrived)

    def _prepare(self, outlines: list[packing.Outline], begins: list[int], size_bytes: int, *, pinned: bool) -> None:
        """Make sure of the buffer and of the views that tensors are copied to; mostly they are as they were."""
        layout = [found.slots for found in outlines]
        large_enough = self._buffer.numel() >= size_bytes
        if large_enough and layout == self._layout:
            return
        if not large_enough:
            self._views, self._buffer = [], torch.empty(0)  # not both at the same time
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._layout = layout
        self._views = [
            packing.view(self._buffer[begin : begin + found.size_bytes], slot)
            for found, begin in zip(outlines, begins, strict=True)
            for slot in found.slots
        ]
