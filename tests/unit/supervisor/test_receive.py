"""The node's end of a push, and what it does with a sender that is broken, hostile or gone."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtctl.launch.files.push import PayloadCache, push_tree_to_node
from dtctl.launch.files.tree import TreeFile, compute_tree_digest, scan_push_tree
from dtctl.supervisor import frames, receive
from tests.unit.pushing import bring, left_in, listing, node, release

FILE, LINK = 0o600, receive.LINK_MODE


@pytest.fixture(autouse=True)
def _no_tree_stays_held() -> Iterator[None]:
    yield
    release()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    for number in range(5):
        (root / "pkg" / f"m{number}.py").write_text(f"X = {number}\n")
    (root / "train.py").write_text("print('hello')\n")
    return root


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return tmp_path / "node"


def row(path: str, data: bytes = b"", *, mode: int = FILE, link: str = "", **changes: object) -> list[object]:
    """A row of a manifest."""
    data = link.encode("latin-1") if mode == LINK else data
    made = {"path": path, "mode": mode, "size": len(data), "digest": hashlib.sha256(data).hexdigest(), "link": link}
    return list({**made, **changes}.values())


def digest_of(rows: object) -> str:
    """The tree's digest as a sender would compute it; of nonsense, any."""
    try:
        return compute_tree_digest([TreeFile(r[0].encode("latin-1"), r[1], r[2], r[3]) for r in rows])  # type: ignore[attr-defined]
    except (TypeError, ValueError, IndexError, AttributeError, KeyError):
        return "0" * 32


class Answers:
    """What the node said to a sender that did not listen, and what it did."""

    def __init__(self, workdir: Path, *parts: bytes, tree: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for sock in (ours, theirs):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            ours.sendall(b"".join(parts))
            ours.shutdown(socket.SHUT_WR)
            self.path: str | None = None
            with contextlib.suppress(receive.PushRefused):
                self.path = receive.receive_tree(frames.FdLink(theirs.fileno(), theirs.fileno(), 5), str(workdir), tree)
            theirs.shutdown(socket.SHUT_WR)
            said = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        self.messages = [frames.decode_message(payload) for _, _, payload in frames.FrameParser().feed(said)]
        self.code = self.messages[-1].get("code")


def send(workdir: Path, rows: object, contents: bytes = b"", *, stream: bytes | None = None, tree: str = "") -> Answers:
    """Send a manifest and contents, whatever they are."""
    manifest = zlib.compress(json.dumps(rows).encode())
    return Answers(
        workdir,
        frames.pack_frame(frames.BYTES, manifest),
        frames.pack_json({"op": "push-manifest-end"}),
        frames.pack_frame(frames.BYTES, zlib.compress(contents) if stream is None else stream),
        frames.pack_json({"op": "push-end"}),
        tree=tree or digest_of(rows),
    )


def test_an_honest_sender_is_served(workdir: Path) -> None:
    rows = [row("a/b.py", b"one"), row("link", mode=LINK, link="a/b.py"), row("run", b"two", mode=0o700)]
    done = send(workdir, rows, b"onetwo")
    assert done.messages[-1]["state"] == "done"
    assert listing(Path(str(done.path))) == {
        b"a/b.py": (0o600, b"one"),
        b"link": (0, b"a/b.py"),
        b"run": (0o700, b"two"),
    }
    assert {oct(p.stat().st_mode & 0o777) for p in (workdir / "code", Path(str(done.path)) / "a")} == {"0o700"}


HOSTILE = {
    "absolute": ([row("/etc/x")], "escape"),
    "parent": ([row("../x")], "escape"),
    "parent inside": ([row("a/../../x")], "escape"),
    "dot": ([row("./x")], "escape"),
    "empty": ([row("")], "escape"),
    "empty part": ([row("a//x")], "escape"),
    "slash at the end": ([row("a/")], "escape"),
    "NUL": ([row("a\0b")], "escape"),
    "twice": ([row("a"), row("a")], "escape"),
    "through a link": ([row("a", mode=LINK, link="b"), row("a/x"), row("b/y")], "escape"),
    "through a file": ([row("a"), row("a/x")], "escape"),
    "link to the root": ([row("a", mode=LINK, link="/etc")], "escape"),
    "link out": ([row("a", mode=LINK, link="..")], "escape"),
    "link out from below": ([row("a/b", mode=LINK, link="../../x")], "escape"),
    "link out and back": ([row("a/b", mode=LINK, link="../../code/x")], "escape"),
    "link through a link": ([row("p/q/up", mode=LINK, link="../.."), row("x", mode=LINK, link="p/q/up/..")], "escape"),
    "empty link": ([row("a", mode=LINK, link="")], "escape"),
    "NUL in a link": ([row("a", mode=LINK, link="b\0")], "escape"),
    "other link": ([row("a", mode=LINK, link="b", digest="0" * 64)], "digest"),
    "set-uid": ([row("a", mode=0o4755)], "protocol"),
    "device": ([row("a", mode=0o060600)], "protocol"),
    "mode of another type": ([row("a", mode=384.0)], "protocol"),  # type: ignore[arg-type]
    "negative size": ([row("a", size=-1)], "protocol"),
    "endless size": ([row("a", size=float("inf"))], "protocol"),
    "size of another type": ([row("a", size="3")], "protocol"),
    "path of another type": ([[3, FILE, 0, "", ""]], "protocol"),
    "path beyond bytes": ([["\u20ac", FILE, 0, "", ""]], "protocol"),
    "no digest": ([row("a", digest=None)], "protocol"),
    "short row": ([["a", FILE]], "protocol"),
    "no rows": (3, "protocol"),
    "a mapping": ({"a": 1}, "protocol"),
    "nothing": (None, "protocol"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path: Path, workdir: Path, name: str) -> None:
    rows, code = HOSTILE[name]
    refused = send(workdir, rows)
    assert (refused.path, refused.code) == (None, code)
    assert left_in(workdir) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node"]


@pytest.mark.parametrize("tree", ["", "../../x", "A" * 32, "0" * 31, "0" * 33, "0" * 31 + "/"])
def test_a_tree_needs_a_digest_for_a_name(workdir: Path, tree: str) -> None:
    assert Answers(workdir, tree=tree).code == "escape"
    assert not workdir.exists()


def test_any_manifest_is_refused_or_stays_in_its_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    parts = st.sampled_from(["a", "b", "..", ".", "", "\0", "é", "x" * 300])
    paths = st.lists(parts, min_size=1, max_size=4).map("/".join)
    rows = st.tuples(paths, st.sampled_from([FILE, 0o700, LINK, LINK, 0o777]), paths).map(
        lambda drawn: row(drawn[0], mode=drawn[1], link=drawn[2])
    )
    junk = st.recursive(
        st.none() | st.integers() | st.text(max_size=3) | st.floats(), lambda s: st.lists(s, max_size=6)
    )

    @settings(max_examples=100, deadline=None)
    @given(st.lists(rows, max_size=4) | junk)
    def check(manifest: object) -> None:
        base = tmp_path_factory.mktemp("any")
        answers = send(base / "node", manifest)
        release()
        assert [path.name for path in base.iterdir()] == ["node"]
        assert answers.path is not None or left_in(base / "node") == []
        if answers.path is not None:
            root = Path(answers.path).resolve()
            for folder, folders, files in os.walk(root):  # not rglob(), which refuses a link with too long a name
                for name in (*folders, *files):  # and not resolve(), which refuses a loop
                    assert Path(os.path.realpath(Path(folder, name))).is_relative_to(root)

    check()


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (zlib.compress(b"12345"), "digest"),  # other contents
        (zlib.compress(b"1234"), "digest"),  # too little
        (zlib.compress(b"hello" + b"x" * (1 << 20)), "escape"),  # too much
        (zlib.compress(b"hello") + b"more", "escape"),
        (zlib.compress(b"hello")[:-1], "escape"),  # the checksum is missing
        (b"hello", "digest"),
    ],
)
def test_contents_that_are_not_what_was_announced_are_refused(workdir: Path, stream: bytes, code: str) -> None:
    refused = send(workdir, [row("a", b"hello")], stream=stream)
    assert (refused.path, refused.code) == (None, code)
    assert left_in(workdir) == []


def test_a_manifest_that_is_not_the_trees_is_refused(workdir: Path) -> None:
    assert send(workdir, [row("a", b"x")], b"x", tree="0" * 32).code == "digest"


def test_a_manifest_that_grows_without_end_is_refused(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_MANIFEST_BYTES", 1000)
    assert send(workdir, [row("a" * 2000)]).code == "escape"


@pytest.mark.parametrize("ends", ["before the manifest", "in the contents"])
def test_a_sender_that_goes_away_leaves_nothing(workdir: Path, ends: str) -> None:
    rows = [row("a", b"hello")]
    parts = [] if ends == "before the manifest" else [
        frames.pack_frame(frames.BYTES, zlib.compress(json.dumps(rows).encode())),
        frames.pack_json({"op": "push-manifest-end"}),
        frames.pack_frame(frames.BYTES, zlib.compress(b"hello")[:4]),
    ]  # fmt: skip
    refused = Answers(workdir, *parts, tree=digest_of(rows))
    assert refused.code == "protocol"
    assert left_in(workdir) == []


def test_an_empty_tree_is_a_tree(tmp_path: Path, workdir: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert [bring(tmp_path / "empty", workdir).state for _ in range(2)] == ["done", "have"]


TAMPERED = ["edited", "edited with its times put back", "removed", "replaced", "made a link", "made a folder"]


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tree_that_was_changed_on_the_node_is_repaired_beside_it(project: Path, workdir: Path, how: str) -> None:
    first = Path(bring(project, workdir).path)
    victim = first / "train.py"
    before = victim.stat()
    if how == "edited":
        victim.write_text("print('other')\n")
    elif how == "edited with its times put back":
        victim.write_text("print('HELLO')\n")
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replaced":
        (first / "pkg" / "m0.py").replace(victim)
    else:
        victim.unlink()
        if how == "made a link":
            victim.symlink_to("pkg/m0.py")
        elif how == "made a folder":
            victim.mkdir()
    tampered = listing(first)
    again = bring(project, workdir)
    assert again.state == "done"
    assert again.path == f"{first}.1"
    assert again.files_sent == (2 if how == "replaced" else 1)
    assert listing(Path(again.path)) == {path: (0o600, data) for path, (_, data) in listing(project).items()}
    assert listing(first) == tampered  # a run may be using it
    assert bring(project, workdir).path == f"{first}.1"


def test_what_a_job_adds_does_not_spoil_a_tree(project: Path, workdir: Path) -> None:
    first = Path(bring(project, workdir).path)
    (first / "results.csv").write_text("1,2\n")
    (first / "pkg" / "__pycache__").mkdir()
    assert bring(project, workdir).state == "have"


def test_a_damaged_file_of_an_older_tree_is_not_reused(project: Path, workdir: Path) -> None:
    first = Path(bring(project, workdir).path)
    (first / "pkg" / "m0.py").write_text("X = 9\n")
    (project / "new.py").touch()
    again = bring(project, workdir)
    assert again.files_sent == 2
    assert (Path(again.path) / "pkg" / "m0.py").read_text() == "X = 0\n"


@pytest.mark.parametrize("seal", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": [[1]]}', b"\xff"])
def test_a_damaged_seal_is_no_seal(project: Path, workdir: Path, seal: bytes) -> None:
    first = bring(project, workdir).path
    Path(first + ".json").write_bytes(seal)
    assert bring(project, workdir).path == first + ".1"


def versions(project: Path, workdir: Path, count: int) -> list[Path]:
    """Push as many versions, the oldest first; nothing holds them afterwards."""
    made = []
    for number in range(count):
        (project / "version.py").write_text(f"VERSION = {number}\n")
        made.append(Path(bring(project, workdir).path))
        release()
    return made


def test_the_newest_trees_are_kept(project: Path, workdir: Path) -> None:
    made = versions(project, workdir, 5)
    assert left_in(workdir) == sorted(path.name for path in made[-3:])
    assert len(list((workdir / "code").glob("*.json"))) == 3


def test_a_tree_that_was_used_again_is_new_again(project: Path, workdir: Path) -> None:
    made = versions(project, workdir, 3)
    (project / "version.py").write_text("VERSION = 0\n")
    assert bring(project, workdir).state == "have"
    (project / "version.py").write_text("VERSION = 9\n")
    bring(project, workdir)
    assert made[0].is_dir()
    assert not made[1].exists()


def test_a_tree_in_use_is_kept(project: Path, workdir: Path) -> None:
    first = versions(project, workdir, 1)[0]
    fd = receive.lock_stored_tree(str(first))
    made = versions(project, workdir, 6)
    assert first.is_dir()
    os.close(fd)
    (project / "version.py").write_text("VERSION = 99\n")
    bring(project, workdir)
    assert not first.exists()
    assert made[-1].is_dir()


def test_a_tree_that_was_brought_is_in_use_until_the_process_ends(project: Path, workdir: Path) -> None:
    first = Path(bring(project, workdir).path)
    fd = os.open(f"{first}.json", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    release()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_what_a_job_has_written_outlives_its_tree(project: Path, workdir: Path) -> None:
    first = versions(project, workdir, 1)[0]
    (first / "pkg" / "__pycache__").mkdir()
    (first / "pkg" / "__pycache__" / "m0.pyc").touch()
    (first / "out").mkdir()
    (first / "out" / "model.pt").write_text("weights")
    (first / "train.py").write_text("print('edited on the node')\n")
    versions(project, workdir, 5)
    assert set(listing(first)) == {b"out/model.pt", b"train.py"}
    assert not Path(f"{first}.json").exists()


def test_what_a_killed_push_has_left_is_removed_and_what_a_live_one_makes_is_not(project: Path, workdir: Path) -> None:
    store = workdir / "code"
    for name in ("1-deadbeef", "2-00000000"):
        (store / f".part-{name}" / "a").mkdir(parents=True)
        (store / f".part-{name}.json").touch()
    with open(store / ".part-2-00000000.json") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        bring(project, workdir)
        assert sorted(path.name for path in store.glob(".part-*")) == [".part-2-00000000", ".part-2-00000000.json"]
    (project / "new.py").touch()
    bring(project, workdir)
    assert list(store.glob(".part-*")) == []


def test_a_push_that_removes_its_part_meanwhile_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: [".part-12-0123abcd.json"])
    receive._prune_tree_store(str(tmp_path))


def test_many_pushes_of_one_tree_at_once_all_end_well(project: Path, workdir: Path) -> None:
    barrier = threading.Barrier(6)
    tree, shared, paths = scan_push_tree(project), PayloadCache(), []

    def one() -> None:
        with node(workdir) as link:
            barrier.wait(60)
            paths.append(push_tree_to_node(link, tree, shared=shared).path)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert paths == [str(workdir / "code" / tree.digest)] * 6
    assert left_in(workdir) == [tree.digest]


def test_pushes_of_different_trees_at_once_all_end_well(tmp_path: Path, workdir: Path) -> None:
    trees = []
    for number in range(6):
        root = tmp_path / f"project{number}"
        root.mkdir()
        (root / "common.py").write_text("X = 1\n" * 1000)
        (root / "own.py").write_text(f"X = {number}\n")
        trees.append(scan_push_tree(root))
    barrier = threading.Barrier(6)
    paths: dict[int, str] = {}

    def one(number: int) -> None:
        with node(workdir) as link:
            barrier.wait(60)
            paths[number] = push_tree_to_node(link, trees[number], shared=PayloadCache()).path

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    # All are in use, so none was pruned.
    assert {n: (Path(paths[n]) / "own.py").read_text() for n in range(6)} == {n: f"X = {n}\n" for n in range(6)}


def test_files_of_the_users_own_in_a_folder_called_code_stay(project: Path, workdir: Path) -> None:
    """Pushes make room by removing old trees; `config.json` beside `config/` looks like one and is none."""
    mine = {"config.json": '{"files": [["a", 384, 1, "", ""]]}', "config/a": "x", ".part-mine.json": "", "notes": ""}
    for name, text in mine.items():
        (workdir / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / "code" / name).write_text(text)
    old = workdir / "code" / ("0" * 32)
    old.mkdir()
    old.with_name(f"{old.name}.json").write_text('{"files": []}')
    for number in range(receive.KEPT_TREES + 2):
        (project / "train.py").write_text(f"{number}")
        bring(project, workdir)
        release()
    assert {name: (workdir / "code" / name).read_text() for name in mine} == mine
    assert old.is_dir(), "a store without our marker was cleaned"


def test_a_tree_whose_folder_was_moved_away_and_linked_is_not_followed(project: Path, workdir: Path) -> None:
    (project / "deep").mkdir()
    (project / "deep" / "data.txt").write_text("kept")
    first = Path(bring(project, workdir).path)
    release()
    kept = workdir.parent / "kept"
    (first / "deep").rename(kept)  # the files in it are still those that were written: same inode, same times
    (first / "deep").symlink_to(kept)
    os.utime(first.with_name(first.name + ".json"), (1, 1))
    for number in range(receive.KEPT_TREES + 1):
        (project / "train.py").write_text(f"{number}")
        bring(project, workdir)
        release()
    assert (kept / "data.txt").read_text() == "kept"
