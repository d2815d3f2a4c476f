"""The one thing that training stops for: a copy of the state into memory that is used again for each snapshot."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.distributed import capacity
from dtctl.runtime.snapshot.format import headers, packing


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One part, ready to be written."""

    name: str
    """Name of the part."""
    outline: packing.Outline
    data: torch.Tensor
    """uint8, a stretch of the staging buffer."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The state of a step as it was; valid until the staging is used again."""

    files: tuple[StagedFile, ...]
    arrived: torch.cuda.Event | None
    """Time when copies from the GPU are through; None if there are none on the way."""

    def wait(self) -> None:
        """Return when all bytes are there."""
        if self.arrived is not None:
            self.arrived.synchronize()


def page_locked(size_bytes: int) -> torch.Tensor:
    """Memory that a GPU can copy to while it computes, as much as was asked for.

    torch's own pinned memory is rounded up to a power of two, 20 GiB to 32, and never given back. Where memory cannot
    be locked otherwise, it is taken all the same.
    """
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    # Before the memory is free: what follows it there would be locked, and could not be locked again.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return buffer


def _require_room(size_bytes: int, node_bytes: int) -> None:
    """Check that a copy of the state fits into the node's memory; else the kernel would kill the process silently.

    Raises:
        SnapshotError: it cannot.
    """
    if size_bytes > node_bytes:
        raise SnapshotError(
            f"a snapshot of {size_bytes / 2**30:.1f} GiB is copied to memory first, of which this node, or its control "
            f"group, has {node_bytes / 2**30:.1f} GiB",
            where="train.snapshot",
            hint="`train.snapshot.layout: sharded` has every worker copy its part; or ask for more memory (--mem)",
        )


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
            outline, tensors = packing.outline(part)
            outlines.append(outline)
            sources += tensors
        begins, size_bytes = [], 0
        for outline in outlines:
            begins.append(size_bytes)
            size_bytes += outline.size_bytes + -outline.size_bytes % headers.ALIGNMENT
        device = next((tensor.device for tensor in sources if tensor.device.type == "cuda"), None)
        self._prepare(outlines, begins, size_bytes, pinned=device is not None)
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=device is not None)
        arrived = None
        if device is not None:
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the writer sleeps until then
            arrived.record(torch.cuda.current_stream(device))
        files = (
            StagedFile(name, outline, self._buffer[begin : begin + outline.size_bytes])
            for name, outline, begin in zip(parts, outlines, begins, strict=True)
        )
        return Staged(tuple(files), arrived)

    def _prepare(self, outlines: list[packing.Outline], begins: list[int], size_bytes: int, *, pinned: bool) -> None:
        """Make sure of the buffer and of the views that tensors are copied to; mostly they are as they were."""
        layout = [outline.slots for outline in outlines]
        large_enough = self._buffer.numel() >= size_bytes
        if large_enough and layout == self._layout:
            return
        if not large_enough:
            self._views, self._buffer = [], torch.empty(0)  # not both at the same time
            _require_room(size_bytes, capacity.of_node())
            self._buffer = page_locked(size_bytes) if pinned else torch.empty(size_bytes, dtype=torch.uint8)
        self._layout = layout
        self._views = [
            packing.view(self._buffer[begin : begin + outline.size_bytes], slot)
            for outline, begin in zip(outlines, begins, strict=True)
            for slot in outline.slots
        ]
