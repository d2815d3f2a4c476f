"""The job's Python on this node, started as workers are: with the job's variables, and not in the home folder.

Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading

START_LIMIT_S = 30.0
"""A Python on a network file system with a cold cache, or on a busy node, has been seen to take most of this."""
LIMIT_S = 3 * START_LIMIT_S
"""Seconds of all starts together: with all variables, without, and then without each of them, at the same time."""
MAX_SUSPECTS = 24
_ASK = r"""
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
loaded = set(sys.modules)
import json, os
folder, beside = json.loads(sys.argv[1])
own = [folder] if folder else []
set_by = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
sys.path[:0] = own
from importlib import machinery
import _imp
library = os.path.dirname(os.__file__)
standard = getattr(sys, "stdlib_module_names", None) or {name.partition(".")[0] for name in os.listdir(library)}
rest = [path for path in sys.path if path not in own + set_by]
no_module = {"test", "this", "antigravity", "idlelib", "turtle", "turtledemo", "__init__", "__main__"}
def hidden(name):
    # What Python finds before any folder, or has loaded by now, cannot be hidden.
    if name in no_module or name in loaded or name in sys.builtin_module_names or _imp.is_frozen(name):
        return ""
    try:
        found = machinery.PathFinder.find_spec(name, rest)
    except Exception:
        return ""
    return str(found.origin) if found and found.origin else ""
def modules(folder):
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in sorted(names)[:2000]:
        if name.endswith(".py"):
            yield name[:-3], os.path.join(folder, name)
        elif os.path.isfile(os.path.join(folder, name, "__init__.py")):
            yield name, os.path.join(folder, name, "__init__.py")
shadows = []
for name, path in beside + [pair for place in own + set_by for pair in modules(place)]:
    # A whole package in a folder of PYTHONPATH is another installation, and meant to be found first.
    installed = path.endswith("__init__.py") and os.path.dirname(os.path.dirname(path)) in set_by
    other = "" if installed and name not in standard else hidden(name)
    if other and os.path.abspath(path) != other:
        shadows.append([name, path, other])
said = {"executable": sys.executable, "python": sys.version.split()[0], "torch": None, "cuda": None, "nccl": None}
said["shadows"] = shadows[:64]
try:
    found = machinery.PathFinder.find_spec("torch", sys.path)
except Exception:
    found = None
if found and found.origin:
    names = {}
    try:
        with open(os.path.join(os.path.dirname(found.origin), "version.py")) as file:
            exec(file.read(), names)
    except Exception:
        pass
    said["torch"], said["cuda"] = names.get("__version__", "unknown"), names.get("cuda")
    said["torch_path"] = found.origin
    for name in os.listdir(os.path.dirname(os.path.dirname(found.origin))):
        if name.startswith("nvidia_nccl_cu") and name.endswith(".dist-info"):
            said["nccl"] = name[:-len(".dist-info")].partition("-")[2]
print()
print(json.dumps(said))
"""


def job_python(python: str, env: dict, folder: str, beside: list) -> dict:  # type: ignore[type-arg]
    """Return the job's Python's versions, and the files that hide modules of its own; torch is not loaded.

    Args:
        python: program or path.
        env: all variables of the job here.
        folder: the job's own, where it is on this node already; else empty.
        beside: [module, path] that the job brings to the folder of its script.

    Returns:
        `python`, `torch`, `cuda`, `nccl`, `torch_path`, `shadows` ([module, path of the one that is found, path of the
        one that is hidden]); or `error`, why it does not start, with `because`: variables without which it does.
    """
    argv = [os.path.expanduser(python), "-c", _ASK, json.dumps([os.path.expanduser(folder), beside])]
    said, error = _run(argv, env)
    if not error:
        return dict(said)
    suspects = [name for name in env if name.startswith(("PYTHON", "LD_")) or env.get(name) != os.environ.get(name)]
    suspects = suspects[:MAX_SUSPECTS]
    plain, still = _run(argv, _without(env, suspects))
    because = []
    if not still:
        because = _each_cured(argv, env, suspects) or suspects
    return {**plain, "error": error, "because": because}


def _each_cured(argv: list, env: dict, suspects: list) -> list:  # type: ignore[type-arg]
    """Return the variables without which it starts; where one makes it hang, it hangs without each other one."""
    errors = dict.fromkeys(suspects, "not tried")

    def start(name: str) -> None:
        errors[name] = _run(argv, _without(env, [name]))[1]

    threads = [threading.Thread(target=start, args=(name,)) for name in suspects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name in suspects if not errors[name]]


def _without(env: dict, names: list) -> dict:  # type: ignore[type-arg]
    return {name: value for name, value in env.items() if name not in names}


def _run(argv: list, env: dict) -> tuple:  # type: ignore[type-arg]
    """Return the object in the last line that it prints, and why there is none."""
    try:
        done = subprocess.run(
            argv, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=START_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, "it has not ended after %g s" % START_LIMIT_S
    except OSError as exc:
        return {}, "it cannot be started: %s" % exc.strerror
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    if isinstance(said, dict) and done.returncode == 0:
        return said, ""
    words = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    # The first line of an interpreter that cannot start is the most informative; of a traceback, the last one.
    fatal = [line for line in words if line.startswith(("Fatal Python error", "Error", "LookupError"))]
    told = (fatal or words[-1:] or ["nothing"])[0]
    return {}, "it ends with status %s: %s" % (done.returncode, told[:400])
