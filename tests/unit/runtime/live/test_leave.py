"""Leaving a group before another one is made."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtctl.runtime.live import recovery


def test_who_has_failed_to_make_a_group_meets_the_others_under_the_name_that_they_know() -> None:
    with pytest.raises(dist.DistStoreError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=1))
    recovery.destroy_broken_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert dist.distributed_c10d._get_default_group().group_name == "0"
    finally:
        recovery.destroy_broken_group()
