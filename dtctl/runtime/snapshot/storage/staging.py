"""Copy of the state into memory that is reused for each snapshot; training pauses only for this copy."""

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
    """A part of a snapshot that is ready to be written."""

    name: str
    """Name of the part."""
    outline: packing.PartOutline
    data: torch.Tensor
    """Stretch of the staging buffer with the data, uint8."""


@dataclass(frozen=True, slots=True)
class StagedState:
    """State of a step at the time of the copy; valid until the buffer is used again."""

    files: tuple[StagedFile, ...]
    arrived: torch.cuda.Event | None
    """Event after which copies from the GPU are complete; None if there are none."""

    def wait(self) -> None:
        """Wait until all bytes have been copied."""
        if self.arrived is not None:
            self.arrived.synchronize()


def allocate_page_locked(size_bytes: int) -> torch.Tensor:
    """Return memory of this size that a GPU can copy to while it computes.

    torch's own pinned memory is rounded up to a power of two (20 GiB to 32 GiB), and never freed. It is used where
    memory cannot be locked otherwise.
    """
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    # Unlocked before the memory is freed: otherwise later memory at this address would be locked already, and could not
    # be locked once more.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
    return buffer


def _require_room(size_bytes: int, node_bytes: int) -> None:
    """Check that a copy of the state fits into the node's memory; else the kernel would kill the process silently.

    Raises:
        SnapshotError: the copy does not fit.
    """
    if size_bytes > node_bytes:
        raise SnapshotError(
            f"a snapshot of {size_bytes / 2**30:.1f} GiB is copied to memory first, of which this node, or its control "
            f"group, has {node_bytes / 2**30:.1f} GiB",
            where="train.snapshot",
            hint="`train.snapshot.layout: sharded` has every worker copy its part; or ask for more memory (--mem)",
        )


class StagingBuffer:
    """Buffer as large as the largest state so far; pinned if the state comes from a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[packing.TensorSlot, ...]] = []
        self._views: list[torch.Tensor] = []

    def stage_tensors(self, parts: Mapping[str, Any]) -> StagedState:
        """Copy all tensors. Copies from a GPU are only enqueued; later work on the GPU runs after them.

        Args:
            parts: name -> tensors and plain values, as `packing.build_part_outline` takes them.

        Raises:
            SnapshotError: a tensor or a key is of a kind that snapshots do not keep.
        """
        outlines, sources = [], []
        for part in parts.values():
            outline, tensors = packing.build_part_outline(part)
            outlines.append(outline)
            sources += tensors
        begins, size_bytes = [], 0
        for outline in outlines:
            begins.append(size_bytes)
            size_bytes += outline.size_bytes + -outline.size_bytes % headers.ALIGNMENT
        device = next((tensor.device for tensor in sources if tensor.device.type == "cuda"), None)
        self._prepare_staging_buffer(outlines, begins, size_bytes, pinned=device is not None)
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
        return StagedState(tuple(files), arrived)

    def _prepare_staging_buffer(
        self, outlines: list[packing.PartOutline], begins: list[int], size_bytes: int, *, pinned: bool
    ) -> None:
        """Prepare the buffer and the views that tensors are copied to; they are reused if the layout is the same."""
        layout = [outline.slots for outline in outlines]
        large_enough = self._buffer.numel() >= size_bytes
        if large_enough and layout == self._layout:
            return
        if not large_enough:
            self._views, self._buffer = [], torch.empty(0)  # freed first, so that there are never two buffers
            _require_room(size_bytes, capacity.compute_node_memory_bytes())
            self._buffer = allocate_page_locked(size_bytes) if pinned else torch.empty(size_bytes, dtype=torch.uint8)
        self._layout = layout
        self._views = [
            packing.view_slot_tensor(self._buffer[begin : begin + outline.size_bytes], slot)
            for outline, begin in zip(outlines, begins, strict=True)
            for slot in outline.slots
        ]
