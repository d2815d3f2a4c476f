"""Checkpoints of common layouts: which files belong together, which are complete, and what nodes lack."""

from __future__ import annotations

import pytest

from dtctl.launch.files.checkpoint_sets import (
    CopyPlan,
    LostNode,
    NodeFiles,
    find_newest_files,
    find_unshared,
    group_files,
    plan_copies,
)
from dtctl.supervisor.messages.shared import SharedFile

NOW_NS = 1_000_000_000_000


def file(
    path: str,
    age_s: float = 60.0,
    *,
    size: int = 9000,
    origin: str = "",
    end: str | None = None,
    at: float | None = None,
) -> SharedFile:
    """A file of a node, `at` so many seconds before now by its mtime."""
    is_torch = path.endswith((".pt", ".pth", ".ckpt", ".bin"))
    known = end if end is not None else ("whole" if is_torch else "")
    mtime_ns = NOW_NS - int((age_s if at is None else at) * 1e9)
    return SharedFile(path=f"out/{path}", size=size, mtime_ns=mtime_ns, age_s=age_s, origin=origin, end=known)


def node(name: str, *files: SharedFile, removed: tuple[str, ...] = ()) -> NodeFiles:
    """A node whose programs have removed files that they wrote and that were copied to other nodes."""
    gone = {f"out/{path}" for path in removed}
    return NodeFiles(node=name, store=f"store-{name}", files={each.path: each for each in files}, removed=gone)


def plan(
    *nodes: NodeFiles, pattern: str = "", stopped_s: float | None = None, lost: tuple[LostNode, ...] = ()
) -> CopyPlan:
    return plan_copies(nodes, [("out", pattern)], stopped_s=stopped_s, lost=lost)


def copied(made: CopyPlan) -> dict[str, list[str]]:
    return {name: [row.path.removeprefix("out/") for row in rows] for name, rows in made.copies.items()}


def copies_of(name: str, *files: SharedFile) -> tuple[SharedFile, ...]:
    """The same files as copies on another node."""
    return tuple(
        SharedFile(**{key: value for key, value in {**vars(each), "origin": f"store-{name}"}.items() if key != "op"})
        for each in files
    )


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["step-20.pt", "step-40.pt"], ["out/20", "out/40"]),
        (["step-20/rank-0.pt", "step-20/rank-1.pt"], ["out/step-20"]),
        (["step20_rank0.pt", "step20_rank1.pt"], ["out/20"]),
        (["global_step20/mp_rank_00_model_states.pt", "latest"], ["out/global_step20", "out/latest"]),
        (["epoch=0-step=20.ckpt", "last.ckpt"], ["out/0-20", "out/last.ckpt"]),
        (["checkpoint-20/model.safetensors", "checkpoint-20/fsdp_0/.metadata"], ["out/checkpoint-20"]),
        (["d12/model_000020.pt", "d12/meta_000020.json", "d12/optim_000020_rank1.pt"], ["out/d12/20"]),
        ([".metadata", "__0_0.distcp", "other/ckpt.pt"], ["out", "out/other/ckpt.pt"]),
        (["iter_0000020/x/y.bin", "000040/z.bin"], ["out/000040", "out/iter_0000020"]),
    ],
)
def test_files_of_one_step_belong_together(paths: list[str], names: list[str]) -> None:
    files = {each.path: each for each in map(file, paths)}
    assert sorted(each.name for each in group_files(files, "out")) == names


def test_files_of_several_nodes_are_one_checkpoint_that_all_get() -> None:
    made = plan(node("a", file("step-20/rank-0.pt")), node("b", file("step-20/rank-1.pt")), node("c"))
    assert copied(made) == {
        "a": ["step-20/rank-1.pt"], "b": ["step-20/rank-0.pt"], "c": ["step-20/rank-0.pt", "step-20/rank-1.pt"],
    }  # fmt: skip
    assert made.rules == {("out", "")}


def test_nothing_is_copied_while_it_may_be_written() -> None:
    assert copied(plan(node("a", file("step-20/a.pt", 9.0), file("step-20/b.pt", 60.0)), node("b"))) == {}
    assert copied(plan(node("a", file("s/ckpt.pt", 30.0, end="cut")), node("b"))) == {}
    made = plan(node("a", file("step-20/.metadata", 1.0), file("step-20/__0_0.distcp", 1.0)), node("b"))
    assert copied(made) == {"b": ["step-20/__0_0.distcp", "step-20/.metadata"]}, "its own file says so; it comes last"


def test_a_folder_of_dcp_that_is_written_again_is_not_complete() -> None:
    old, new = file("step-20/.metadata", 100.0), file("step-20/__0_0.distcp", 1.0)
    assert copied(plan(node("a", old, new), node("b"))) == {}


def test_hugging_face_is_complete_by_its_last_file_also_where_none_is_there_yet() -> None:
    whole = [file("checkpoint-20/rng_state_0.pth", 90.0), file("checkpoint-20/trainer_state.json", 90.0)]
    begun = file("checkpoint-40/model.safetensors", 60.0)
    made = plan(node("a", *whole, begun), node("b"))
    assert copied(made) == {"b": ["checkpoint-20/rng_state_0.pth", "checkpoint-20/trainer_state.json"]}


def test_a_pattern_says_what_is_written_last() -> None:
    files = [file("step-20/a.raw", 1.0), file("step-20/DONE", 1.0), file("step-40/a.raw", 60.0)]
    made = plan(node("a", *files), node("b"), pattern="DON?")
    assert copied(made) == {"b": ["step-20/a.raw", "step-20/DONE"]}
    assert made.rules == {("out", "DON?")}


def test_the_newest_version_wins_and_copies_are_known_again() -> None:
    old, new = file("ckpt.pt", 90.0), file("ckpt.pt", 20.0)
    assert copied(plan(node("a", new), node("b", old))) == {"b": ["ckpt.pt"]}
    assert copied(plan(node("a", new), node("b", *copies_of("a", new)))) == {}


def test_what_its_program_has_removed_does_not_come_back() -> None:
    old = file("step-20.pt", 90.0)
    made = plan(node("a", removed=("step-20.pt",)), node("b", *copies_of("a", old)), node("c"))
    assert copied(made) == {}
    assert made.removals == {"b": ["out/step-20.pt"]}
    lost = plan(node("a"), node("b", *copies_of("a", old)), node("c"))
    assert sorted(copied(lost)) == ["a", "c"], "its disk may have lost it"
    assert lost.removals == {}
    gone = plan(node("b", *copies_of("a", old)), node("c"))
    assert copied(gone) == {"c": ["step-20.pt"]}, "but the writer's disk may be gone"
    assert gone.copies["c"][0].origin == "store-a"


def test_what_another_node_wrote_is_not_removed() -> None:
    first, second, again = file("step-20/rank-0.pt"), file("step-20/rank-1.pt"), file("best.pt", 30.0)
    made = plan(
        node("a", removed=("step-20/rank-0.pt", "best.pt")),
        node("b", second, *copies_of("a", first, file("best.pt"))),
        node("c", *copies_of("b", second), again),
    )
    assert made.removals == {"b": ["out/step-20/rank-0.pt", "out/best.pt"]}
    assert copied(made) == {"a": ["best.pt"], "b": ["best.pt"]}, "the rest of step-20 does not come back to a"


def test_a_folder_that_is_written_anew_with_other_files_is_copied() -> None:
    a = [file("last/.metadata"), file("last/__0_0.distcp")]
    made = plan(node("a", *a, removed=("last/__0_1.distcp",)), node("b", file("last/__1_0.distcp")))
    assert copied(made)["a"] == ["last/__1_0.distcp"]


# -- when workers have ended ------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_last_seconds_counts_if_it_is_whole() -> None:
    before = [file("step-20.pt", 30.0), file("step-40.pt", 4.0)]
    made = plan(node("a", *before), node("b"), stopped_s=2.0)
    assert sorted(copied(made)["b"]) == ["step-20.pt", "step-40.pt"]
    assert made.aside == {}


def test_one_that_was_cut_off_is_set_aside() -> None:
    files = [file("step-20.pt", 30.0), file("step-40.pt", 4.0, end="cut")]
    made = plan(node("a", *files), node("b"), stopped_s=2.0)
    assert made.aside == {"a": ["out/step-40.pt"]}
    assert copied(made) == {"b": ["step-20.pt"]}


def test_one_that_lacks_the_file_of_a_rank_is_set_aside_on_all_nodes() -> None:
    first = [file("step-20/rank-0.pt", 30.0), file("step-20/rank-1.pt", 30.0)]
    made = plan(node("a", *first, file("step-40/rank-0.pt", 3.0)), node("b", *first), stopped_s=2.0)
    assert made.aside == {"a": ["out/step-40/rank-0.pt"]}
    assert copied(made) == {}


def test_one_that_went_with_a_lost_node_is_set_aside_however_old_it_is() -> None:
    first = [file("step-20/.metadata", 90.0), file("step-20/__0_0.distcp", 90.0), file("step-20/__1_0.distcp", 90.0)]
    second = [file("step-40/.metadata", 30.0), file("step-40/__0_0.distcp", 30.0)]
    seen = LostNode(paths=["out/step-40/__1_0.distcp"], listed_s=20.0)
    unseen = LostNode(paths=[], listed_s=31.0)
    for lost in (seen, unseen):
        made = plan(node("a", *first, *second), node("b", *first), stopped_s=2.0, lost=(lost,))
        assert sorted(made.aside["a"]) == ["out/step-40/.metadata", "out/step-40/__0_0.distcp"], lost
    before = LostNode(paths=[], listed_s=5.0)
    made = plan(node("a", *first, *second), node("b", *first), stopped_s=2.0, lost=(before,))
    assert made.aside == {}, "the lost node had no part of it"


@pytest.mark.parametrize("is_lost", [True, False])
def test_young_ones_without_the_files_of_a_lost_node_are_set_aside(is_lost: bool) -> None:
    """All are so young that none is certain, and one alone had been copied before its host was gone."""

    def of_step(step: int, age_s: float) -> tuple[tuple[SharedFile, ...], tuple[SharedFile, ...]]:
        own = tuple(file(f"step-{step}/{name}", age_s, end="") for name in (".metadata", "__0_0.distcp"))
        return own, (file(f"step-{step}/__1_0.distcp", age_s, end=""),)

    (first, part), (second, _) = of_step(8, 8.0), of_step(12, 4.0)
    a = node("a", *first, *copies_of("b", *part), *second)
    spare = node("c", *copies_of("a", *first), *copies_of("b", *part))
    lost = (LostNode(paths={each.path for each in (*first, *part)}, listed_s=5.0),) if is_lost else ()
    made = plan(a, spare, stopped_s=1.0, lost=lost)
    assert made.aside_names == (["out/step-12"] if is_lost else [])
    assert made.complete == (1 if is_lost else 2)


def test_the_version_before_comes_back_from_a_copy() -> None:
    old, new = file("ckpt.pt", 60.0), file("ckpt.pt", 3.0, end="cut")
    made = plan(node("a", new), node("b", *copies_of("a", old)), stopped_s=1.0)
    assert made.aside == {"a": ["out/ckpt.pt"]}
    assert copied(made) == {"a": ["ckpt.pt"]}


def test_the_only_checkpoint_is_never_set_aside() -> None:
    made = plan(node("a", file("step-20/rank-0.pt", 3.0), file("step-20/x.raw", 3.0)), node("b"), stopped_s=1.0)
    assert made.aside == {}
    assert made.doubtful == ["out/step-20"]
    assert copied(made)["b"]
    dcp = plan(node("a", file("step-20/__0_0.distcp", 3.0)), node("b"), stopped_s=1.0)
    assert (dcp.aside, copied(dcp)) == ({}, {}), "what is not complete for certain stays where it is, alone"


def test_without_any_complete_one_all_nodes_begin_anew() -> None:
    """The host of rank 1 was lost before anything was copied; its last file was not even listed."""
    left = [
        file(f"d12/{name}_0000{step}{rank}.pt", 30.0 - step)
        for step in (10, 20)
        for name, rank in (("m", ""), ("o", "_rank0"))
    ]
    lost = LostNode(paths=["out/d12/o_000010_rank1.pt"], listed_s=12.0)
    made = plan(node("a", *left), node("b"), stopped_s=2.0, lost=(lost,))
    assert sorted(made.aside["a"]) == sorted(each.path for each in left)
    assert (made.doubtful, copied(made)) == ([], {})


def test_a_name_of_the_newest_one_goes_back_with_it() -> None:
    first = file("global_step20/a.pt", 60.0)
    old, new = file("latest", 60.0, size=13), file("latest", 2.0, size=13)
    cut = file("global_step40/a.pt", 2.0, end="cut")
    made = plan(
        node("a", first, cut, new), node("b", *copies_of("a", first), *copies_of("a", old)), stopped_s=1.0
    )  # fmt: skip
    assert sorted(made.aside["a"]) == ["out/global_step40/a.pt", "out/latest"]
    assert copied(made) == {"a": ["latest"]}


def test_logs_are_left_where_they_are() -> None:
    log = file("events.out.tfevents.17.a", 0.5)
    made = plan(node("a", file("step-20.pt", 60.0), log), node("b"), stopped_s=0.2)
    assert made.aside == {}
    assert copied(made) == {"b": ["step-20.pt"]}


def test_shapes_differ_by_ranks_alone() -> None:
    def shape(*paths: str) -> frozenset[str]:
        (found,) = group_files({each.path: each for each in map(file, paths)}, "out")
        return found.shape

    assert shape("m_000020.pt", "o_000020_rank0.pt") == shape("m_000040.pt", "o_000040_rank0.pt")
    assert shape("m_000020.pt", "o_000020_rank0.pt") != shape("m_000040.pt", "o_000040_rank1.pt")
    assert shape("step-20/step_20.pt", "step-20/.metadata") == shape("step-40/step_40.pt", "step-40/.metadata")


def test_folders_that_other_nodes_lack_are_found() -> None:
    nodes = [node("a", file("step-20.pt")), node("b")]
    assert find_unshared(nodes) == {"out/": ["a"]}
    assert find_unshared([nodes[0], node("b", file("step-20.pt"))]) == {}
    assert find_newest_files({}, "out") == {}
