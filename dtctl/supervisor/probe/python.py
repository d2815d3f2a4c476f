"""Facts about the job's Python on this node, started like workers with the job's variables, outside the home folder.

Stdlib only, Python 3.8.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading

START_LIMIT_S = 30.0
"""Seconds for a start; on a network file system with a cold cache, or on a busy node, it can take most of them."""
LIMIT_S = 3 * START_LIMIT_S
"""Seconds of all starts: with all variables, without them, and then several at once, each without one of them."""
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


def examine_job_python(python: str, env: dict, folder: str, beside: list) -> dict:  # type: ignore[type-arg]
    """Return versions of the job's Python and its packages, and files that hide modules, without loading torch.

    Args:
        python: name or path of the Python.
        env: all variables of the job on this node.
        folder: folder of the job's code, if this node has it already; otherwise empty.
        beside: [module, path] of each module in the folder of the job's script.

    Returns:
        `python`, `torch`, `cuda`, `nccl`, `torch_path`, `shadows` ([module, path of the found file, path of the hidden
        file]); or `error`, the reason why Python does not start, with `because`, variables without which it starts.
    """
    argv = [os.path.expanduser(python), "-c", _ASK, json.dumps([os.path.expanduser(folder), beside])]
    said, error = _run_json_program(argv, env)
    if not error:
        return dict(said)
    suspects = [name for name in env if name.startswith(("PYTHON", "LD_")) or env.get(name) != os.environ.get(name)]
    suspects = suspects[:MAX_SUSPECTS]
    plain, still = _run_json_program(argv, _remove_variables(env, suspects))
    because = []
    if not still:
        because = _each_cured(argv, env, suspects) or suspects
    return {**plain, "error": error, "because": because}


def _each_cured(argv: list, env: dict, suspects: list) -> list:  # type: ignore[type-arg]
    """Return the variables of which Python starts without any one; other starts may hang because of that variable."""
    errors = dict.fromkeys(suspects, "not tried")

    def start(name: str) -> None:
        errors[name] = _run_json_program(argv, _remove_variables(env, [name]))[1]

    threads = [threading.Thread(target=start, args=(name,)) for name in suspects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [name for name in suspects if not errors[name]]


def _remove_variables(env: dict, names: list) -> dict:  # type: ignore[type-arg]
    return {name: value for name, value in env.items() if name not in names}


def _run_json_program(argv: list, env: dict) -> tuple:  # type: ignore[type-arg]
    """Run a program; return the object in the last line of its output, and the reason if there is none."""
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
    # If the interpreter cannot start, the first line is the most informative; of a traceback, the last line is.
    fatal = [line for line in words if line.startswith(("Fatal Python error", "Error", "LookupError"))]
    told = (fatal or words[-1:] or ["nothing"])[0]
    return {}, "it ends with status %s: %s" % (done.returncode, told[:400])
