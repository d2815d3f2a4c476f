import inspect
import re
import signal
from pathlib import Path

from dtctl import errors, names

ROOT = Path(__file__).resolve().parents[2]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = dict(re.findall(r"^[ |+-]*(\w+)\s{2,}(\d+|130/143)?", errors.__doc__ or "", re.MULTILINE))
    classes = {
        name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, errors.DtctlError)
    }
    assert set(classes) <= set(drawn)
    for name, code in drawn.items():
        if name in classes and name != "Interrupted" and code:
            assert classes[name].exit_code == int(code), name


def test_exit_codes_are_the_contract() -> None:
    assert {
        errors.DtctlError: 1,
        errors.UsageError: 2,
        errors.SpecError: 3,
        errors.PlanError: 4,
        errors.RenderError: 5,
        errors.TransportError: 6,
        errors.LaunchError: 7,
        errors.WorkerFailed: 8,
        errors.DoctorFailed: 9,
        errors.SnapshotError: 10,
    }.items() <= {
        cls: cls.exit_code for cls in vars(errors).values() if inspect.isclass(cls) and hasattr(cls, "exit_code")
    }.items()


def test_the_table_of_exit_codes_is_whole() -> None:
    """In docs/launch.md, which a clone has; mkdocs draws the tree."""
    _, _, section = (ROOT / "docs/launch.md").read_text(encoding="utf-8").partition("\n## Exit codes\n")
    rows = re.findall(r"^\| ([\d, ]+) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    told = [int(code) for codes, _ in rows for code in codes.split(",")]
    classes = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.DtctlError)]
    stopped = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert told == sorted({0, names.REQUEUE_EXIT} | stopped | {cls.exit_code for cls in classes})
    assert "docs/launch.md#exit-codes" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_several_nodes_keep_their_own_errors() -> None:
    a = errors.ConnectError("refused", node="a")
    b = errors.AuthError("no key", node="b")
    both = errors.NodeFailures({"a": a, "b": b})
    assert both.where == "a, b"
    assert list(both.failures.values()) == [a, b]
