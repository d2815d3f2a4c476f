"""All workers write a snapshot together, and read what lies on any node; a node or a byte less is borne or said."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtctl.errors import SnapshotError
from dtctl.runtime import Worker
from dtctl.runtime.snapshot import commands, load, write
from dtctl.runtime.snapshot.assembly import TensorEntry
from dtctl.runtime.snapshot.choose import choose_newest_snapshot
from dtctl.runtime.snapshot.distributed_saver import DistributedSaver
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.reshard import reshard_snapshot_parts
from dtctl.runtime.snapshot.storage.stores import find_shared_stores
from tests.facts import raises
from tests.hosts import wait_until
from tests.unit.runtime.snapshot.gang import gang

COUNT = 3


def parts(step: int, worker: Worker, *, dim: int = 0) -> dict[str, Any]:
    """Two tensors that are divided, one that everyone has, one of this worker alone, and what is no tensor."""
    mesh = init_device_mesh("cpu", (worker.world_size,))
    weight = torch.arange(70.0).view(7, 10) + step
    moment = distribute_tensor(weight * 2, mesh, [Shard(dim)])
    return {
        "model": {"weight": distribute_tensor(weight, mesh, [Shard(dim)]), "same": torch.full((5,), float(step))},
        "optimizer": {
            "state": {"weight": {"exp_avg": moment, "step": torch.tensor(float(step))}},
            "groups": [{"lr": 0.5, "params": ["weight", "same"]}],
        },
        "strategy": {str(worker.rank): {"own": torch.tensor([worker.rank])}},
    }


def folder_of(base: Path, worker: Worker, *, shared: bool) -> Path:
    return base / "all" if shared else base / f"node{worker.node_rank}"


def saving(
    base: Path, *, shared: bool, replicas: int = 0, steps: tuple[int, ...] = (1, 2), in_memory: bool = False
) -> Any:
    def action(worker: Worker) -> list[str]:
        folder = folder_of(base, worker, shared=shared)
        with DistributedSaver(folder, worker, keep=2, replicas=replicas, in_memory=in_memory) as saver:
            for step in steps:
                saver.save(step, parts(step, worker), facts={"position": step})
        return sorted(path.name for path in layout.build_snapshot_path(folder, steps[-1]).iterdir())

    return action


def loading(base: Path, *, shared: bool) -> Any:
    """What all workers find together, each with what it needs of it; divided along the other dim."""

    def action(worker: Worker) -> dict[str, Any]:
        like = parts(0, worker, dim=1)["model"]

        def wanted(part: str, leaf: TensorEntry) -> torch.Tensor | bool:
            if part == "strategy":
                return leaf.path[0] == str(worker.rank)
            return like["weight"] if leaf.shape == (7, 10) else True

        chosen = choose_newest_snapshot(folder_of(base, worker, shared=shared), worker)
        if chosen.manifest is None:
            return {"step": None, "rejected": chosen.rejected}
        found = reshard_snapshot_parts(chosen, wanted, worker)
        # gloo's thread drops a broadcast's tensor a moment after the broadcast has ended for the one that waits.
        wait_until(
            lambda: str(base) not in Path("/proc/self/maps").read_text(),
            limit_s=1,
            what="no map of a snapshot that may be removed",
        )
        weight, moment = found["model"]["weight"], found["optimizer"]["state"]["weight"]["exp_avg"]
        assert weight.placements == like["weight"].placements
        return {
            "step": chosen.manifest.step,
            "rejected": chosen.rejected,
            "local": list(weight.to_local().shape),
            "weight": weight.full_tensor().tolist(),
            "twice": torch.equal(weight.full_tensor() * 2, moment.full_tensor()),
            "same": found["model"]["same"].tolist(),
            "own": found["strategy"].get(str(worker.rank), {}).get("own", torch.zeros(0)).tolist(),
            "groups": found["optimizer"]["groups"],
        }

    return action


def check(answers: list[Any], step: int) -> None:
    for rank, answer in enumerate(answers):
        assert answer["step"] == step
        assert answer["weight"] == (torch.arange(70.0).view(7, 10) + step).tolist()
        assert answer["twice"]
        assert answer["same"] == [float(step)] * 5
        assert answer["own"] == [rank]
        assert answer["groups"] == [{"lr": 0.5, "params": ["weight", "same"]}]


def test_each_writes_its_pieces_and_each_gets_what_it_needs(tmp_path: Path) -> None:
    listed = gang(COUNT, tmp_path, saving(tmp_path, shared=True), per_node=COUNT)
    names = [f"{part}.{rank:05d}.safetensors" for part in ("model", "optimizer", "strategy") for rank in range(COUNT)]
    assert listed == [sorted([*names, layout.COMMIT, layout.MANIFEST])] * COUNT
    assert [path.name for path in (tmp_path / "all").iterdir() if path.name.startswith(".")] == []
    for count in (COUNT, 2, 4):
        answers = gang(count, tmp_path, loading(tmp_path, shared=True), per_node=count)
        check(answers[:COUNT], 2)
        assert [answer["rejected"] for answer in answers] == [[]] * count
    found = load.newest(tmp_path / "all")
    assert found is not None
    assert torch.equal(found.parts["model"]["weight"], torch.arange(70.0).view(7, 10) + 2)
    same = torch.zeros(5)
    filled = load.newest(tmp_path / "all", into={"model": {"weight": torch.zeros(7, 10), "same": same}})
    assert filled is not None
    assert torch.equal(filled.parts["model"]["weight"], found.parts["model"]["weight"])
    assert same.tolist() == [2.0] * 5


def test_a_snapshot_in_memory_is_loaded_like_any_other(tmp_path: Path) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=True, in_memory=True), per_node=COUNT)
    manifest = json.loads((layout.build_snapshot_path(tmp_path / "all", 2) / layout.MANIFEST).read_text())
    assert manifest["hash"] == layout.HASH_IN_MEMORY
    for count in (COUNT, 2):
        check(gang(count, tmp_path, loading(tmp_path, shared=True), per_node=count)[:COUNT], 2)


def test_the_digest_is_that_of_the_whole(tmp_path: Path) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=True), per_node=COUNT)

    write.save_snapshot_parts(tmp_path / "whole", 2, parts_of_one(2), facts={}, keep=1)
    one, other = (
        commands.compute_snapshot_digest(tmp_path / "all"),
        commands.compute_snapshot_digest(tmp_path / "whole"),
    )
    assert one["digest"] == other["digest"]
    out, out_whole = tmp_path / "a", tmp_path / "b"
    commands.export_snapshot_part(tmp_path / "all", part="optimizer", out=out)
    commands.export_snapshot_part(tmp_path / "whole", part="optimizer", out=out_whole)
    assert out.read_bytes() == out_whole.read_bytes()
    assert commands.describe_newest_snapshot(tmp_path / "all")["tensors"]["model.weight"] == {
        "dtype": "float32",
        "shape": [7, 10],
    }


def parts_of_one(step: int) -> dict[str, Any]:
    weight = torch.arange(70.0).view(7, 10) + step
    return {
        "model": {"weight": weight, "same": torch.full((5,), float(step))},
        "optimizer": {
            "state": {"weight": {"exp_avg": weight * 2, "step": torch.tensor(float(step))}},
            "groups": [],
        },
    }


def test_what_a_node_lacks_comes_from_the_others(tmp_path: Path) -> None:
    listed = gang(COUNT, tmp_path, saving(tmp_path, shared=False))
    assert [name for name in listed[1] if name.startswith("model")] == ["model.00001.safetensors"]
    check(gang(COUNT, tmp_path, loading(tmp_path, shared=False)), 2)


@pytest.mark.parametrize("lost", range(COUNT))
def test_with_copies_any_node_may_be_lost(tmp_path: Path, lost: int) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=False, replicas=1))
    shutil.rmtree(tmp_path / f"node{lost}")
    check(gang(COUNT, tmp_path, loading(tmp_path, shared=False)), 2)


def test_without_copies_the_loss_is_said(tmp_path: Path) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=False))
    shutil.rmtree(tmp_path / "node1")
    answers = gang(COUNT, tmp_path, loading(tmp_path, shared=False))
    assert [answer["step"] for answer in answers] == [None] * COUNT
    lacking = "; ".join(f"{part}.00001.safetensors is missing" for part in ("model", "optimizer", "strategy"))
    assert answers[0]["rejected"] == [f"step-0000000{step} is incomplete: {lacking}" for step in (2, 1)]


def test_a_damaged_file_is_taken_from_where_it_is_good_and_else_the_snapshot_before(tmp_path: Path) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=False, replicas=1))
    spoil(tmp_path / "node0" / "step-00000002" / "model.00000.safetensors")
    check(gang(COUNT, tmp_path, loading(tmp_path, shared=False)), 2)
    spoil(tmp_path / "node1" / "step-00000002" / "model.00000.safetensors")
    answers = gang(COUNT, tmp_path, loading(tmp_path, shared=False))
    check(answers, 1)
    reason = "model.00000.safetensors does not have the digest that was recorded"
    assert answers[2]["rejected"] == [f"step-00000002 is corrupt: {reason}"]


def spoil(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)


def test_a_failure_on_one_is_one_of_all_and_what_was_there_stays(tmp_path: Path) -> None:
    gang(COUNT, tmp_path, saving(tmp_path, shared=False, steps=(1,)))

    def action(worker: Worker) -> list[Any]:
        told: list[str] = []
        folder = folder_of(tmp_path, worker, shared=False)
        saver = DistributedSaver(folder, worker, complain=lambda error: told.append(error.message))
        saver.save(2, parts(2, worker), facts={})
        saver.wait()
        if worker.rank == 1:  # the next one's draft cannot be made: its name is taken by a file
            assert saver._stores is not None
            (folder / f".step-00000003.{saver._stores.token}{layout.DRAFT_SUFFIX}").write_text("")
        saver.save(3, parts(3, worker), facts={})
        with raises(SnapshotError, "step 3 rank 1 exists"):
            saver.finish()
        return [saver.failed, len(told), [step for step, _ in layout.list_step_folders(folder)]]

    assert gang(COUNT, tmp_path, action) == [[1, 1, [2, 1]], [1, 0, [2, 1]], [1, 0, [2, 1]]]


def test_buffers_are_those_of_the_first_that_has_them(tmp_path: Path) -> None:
    def action(worker: Worker) -> None:
        model = nn.ModuleDict({"all": nn.BatchNorm1d(3), str(worker.rank // 2): nn.BatchNorm1d(2, affine=False)})
        for name, buffer in model.named_buffers():
            if "mean" in name:
                buffer += worker.rank
        trained = {name for name, _ in model.named_parameters()}
        # Of what only others have, a worker cannot say whether it is trained.
        with DistributedSaver(tmp_path / "all", worker, firsts=lambda key: key[1] not in trained) as saver:
            saver.save(1, {"model": model.state_dict()}, facts={})

    gang(4, tmp_path, action, per_node=4)
    found = load.newest(tmp_path / "all")
    assert found is not None
    means = {name: value.tolist() for name, value in found.parts["model"].items() if "mean" in name}
    assert means == {"all.running_mean": [0, 0, 0], "0.running_mean": [0, 0], "1.running_mean": [2, 2]}
    assert found.parts["model"].keys() >= {"all.weight", "all.bias", "0.running_var", "1.num_batches_tracked"}
    manifest = json.loads((tmp_path / "all" / "step-00000001" / layout.MANIFEST).read_text())
    assert manifest["format"] == layout.FORMAT_SPREAD


def test_what_nobody_would_write_is_found_in_any_mesh(tmp_path: Path) -> None:
    """Each worker has other things, as in a pipeline with replicas, and the same things are shared by several."""

    def action(worker: Worker) -> None:
        names = [f"block{worker.rank // 2}.{index}" for index in range(5)] + ["tied"]
        model = {name: torch.full((7,), 1.0 + len(name)) for name in names}
        own = set(names)
        with DistributedSaver(tmp_path / "all", worker, firsts=lambda key: key[1] not in own) as saver:
            saver.save(1, {"model": model}, facts={})

    gang(4, tmp_path, action, per_node=4)
    found = load.newest(tmp_path / "all")
    assert found is not None
    names = {f"block{half}.{index}" for half in range(2) for index in range(5)} | {"tied"}
    assert found.parts["model"].keys() == names


def test_nodes_with_one_disk_are_recognized_and_keep_one_copy(tmp_path: Path) -> None:
    def action(worker: Worker) -> list[list[int]]:
        return [
            list(ranks)
            for ranks in find_shared_stores(folder_of(tmp_path, worker, shared=worker.rank < 3), worker).ranks
        ]

    assert gang(4, tmp_path, action) == [[[0, 1, 2], [3]]] * 4
    assert list((tmp_path / "all").iterdir()) == [], "no sign is left behind"
    sizes = []
    for replicas in (0, 1):
        base = tmp_path / str(replicas)
        base.mkdir()
        gang(COUNT, base, saving(base, shared=True, replicas=replicas))
        sizes.append(sum(path.stat().st_size for path in (base / "all" / "step-00000002").iterdir()))
    assert sizes[0] == sizes[1]


def test_a_worker_that_is_killed_in_a_save_fails_it_for_the_others(tmp_path: Path) -> None:
    gang(2, tmp_path, saving(tmp_path, shared=False, steps=(1,)))

    def action(worker: Worker) -> None:
        saver = DistributedSaver(folder_of(tmp_path, worker, shared=False), worker, complain=lambda _: None)
        saver.save(2, parts(2, worker), facts={})
        saver.wait()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        saver.save(3, {"model": {"alone": torch.zeros(3)}}, facts={})

    with raises(AssertionError, "0 1 died"):
        gang(2, tmp_path, action)
    drafts = [path for node in range(2) for path in (tmp_path / f"node{node}").glob(f".*{layout.DRAFT_SUFFIX}")]
    assert drafts == []
    for step in (2, 1):
        assert all((tmp_path / f"node{node}" / f"step-0000000{step}" / layout.COMMIT).is_file() for node in range(2))
