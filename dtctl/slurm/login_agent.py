"""Runs on the machine that has Slurm's commands, one request at a time. Stdlib only, Python 3.8.

Sent as text; the request is JSON on standard input, the answer JSON on standard output.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from typing import Any

FIELDS = (
    "JobState", "Reason", "StartTime", "EndTime", "NodeList", "ExitCode", "Restarts", "Partition", "TimeLimit",
    "Account", "QOS",
)  # fmt: skip
Json = dict[str, Any]
PART_BYTES = 1 << 20
"""Bytes of a file that one answer brings at most."""
PROGRESS_BYTES = 1 << 26
"""The same of the record of the workers' progress, which is put in order with the job's log: of some weeks."""


def run(*argv: str, env: dict[str, str] | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    """A command to its end, with `text` on its standard input."""
    return subprocess.run(argv, env=env, input=text, capture_output=True, text=True, check=False)


def offer(_: Json) -> Json:
    """The partitions, and each node of each: name, partition, state, generic resources, features."""
    partitions = run("scontrol", "show", "partition", "-o")
    listed = run("sinfo", "-h", "-N", "-o", "%N|%P|%T|%G|%f")
    if partitions.returncode or listed.returncode:
        errors = (partitions.stderr or listed.stderr).strip().splitlines()
        return {"error": "Slurm does not answer: %s" % (errors[-1] if errors else "no message")}
    return {
        "partitions": [
            dict(re.findall(r"(\w+)=(\S*)", line)) for line in partitions.stdout.splitlines() if line.strip()
        ],
        "nodes": [line.split("|") for line in listed.stdout.splitlines()],
    }


def place(request: Json) -> Json:
    """Make the folder of a run below the work folder, for its user alone; not where nothing can be submitted."""
    if shutil.which("sbatch") is None:
        return {"error": "sbatch: not found"}
    os.umask(0o077)
    folder = os.path.join(os.path.realpath(os.path.expanduser(request["workdir"])), "slurm", request["run"])
    os.makedirs(folder)
    return {"folder": folder}


def fill(request: Json) -> Json:
    """Put files, and a copy of the code that was pushed, into the folder: an edit must not change a job that waits."""
    os.umask(0o077)
    if request["code"]:
        shutil.copytree(request["code"], os.path.join(request["folder"], "code"), symlinks=True)
    for name, text in request["files"].items():
        with open(os.path.join(request["folder"], name), "w", encoding="utf-8") as file:
            file.write(text)
    return {}


def submit(request: Json) -> Json:
    """Test the batch file and submit it; secrets come with the request, so that no argument list shows them."""
    env = {**os.environ, **request["env"]}
    file = os.path.join(request["folder"], "job.sbatch")
    # First only to try: Slurm takes a job that can never start, for more nodes than there are, and lets it wait.
    for option in ("--test-only", "--parsable"):
        done = run("sbatch", option, file, env=env)
        if done.returncode:
            return {"code": done.returncode, "said": done.stderr}
    return {"code": 0, "job": done.stdout.strip().partition(";")[0]}


def test(request: Json) -> Json:
    """Slurm's opinion of a batch file that was not written to disk."""
    done = run("sbatch", "--test-only", text=request["text"])
    return {"code": done.returncode, "said": done.stderr}


def look(request: Json) -> Json:
    """How the job is, and what its files hold beyond what the requester has."""
    job = state(request["job"])
    return {"job": job, "files": news(request["folder"], request["have"])}


def standing(request: Json) -> Json:
    """How the job is."""
    return {"job": state(request["job"])}


def state(job: str) -> Json:
    """Some fields of `scontrol show job`; of sacct when the controller has forgotten the job; none when both have."""
    done = run("scontrol", "show", "job", "-o", job)
    if done.returncode == 0 and done.stdout.strip():
        fields = dict(re.findall(r"(?:^|\s)(%s)=(\S*)" % "|".join(FIELDS), done.stdout.splitlines()[0]))
        # A line for each component of a heterogeneous job; the first stands for all but the nodes.
        lists = re.findall(r"\sNodeList=(\S+)", done.stdout)
        if lists and "(null)" not in lists:
            fields["nodes"] = run("scontrol", "show", "hostnames", ",".join(lists)).stdout.split()
        fields["ids"] = re.findall(r"(?:^|\n)JobId=(\d+)", done.stdout)
        # Slurm writes its own machine's local time; the requester may be in another time zone.
        fields["start"], fields["end"] = moment(fields.get("StartTime", "")), moment(fields.get("EndTime", ""))
        return fields
    if "Invalid job id" not in done.stderr:
        return {"JobState": "UNKNOWN", "Reason": (done.stderr.strip().splitlines() or ["scontrol printed nothing"])[-1]}
    try:
        accounting = run("sacct", "-j", job, "-X", "-n", "-P", "-o", "State,ExitCode,End")
    except OSError:
        return {"JobState": "FORGOTTEN"}
    job_state, code, end = (accounting.stdout.strip().splitlines() or ["||"])[-1].split("|")[:3]
    return (
        {"JobState": job_state.split()[0], "ExitCode": code, "end": moment(end)}
        if job_state
        else {"JobState": "FORGOTTEN"}
    )


def moment(text: str) -> float | None:
    """Seconds since the epoch of a time as Slurm writes it; None of none."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None


def news(folder: str, have: dict[str, int]) -> Json:
    """Relative path -> [offset, what follows in base64] of the files that have grown, or begun anew.

    The job's log comes only with all that was written before what it tells: the start of another attempt, for one.
    """
    grown: Json = {}
    add(grown, folder, "job.log", have)
    add(grown, folder, "progress.jsonl", have, PROGRESS_BYTES)
    add(grown, folder, "metrics.jsonl", have)
    for name in files(os.path.join(folder, "hangs"), (".txt", ".json")):
        add(grown, folder, os.path.join("hangs", name), have)
    logs = os.path.join(folder, "logs")
    attempts = sorted(listed(logs), key=lambda name: int(name.partition("-")[2] or 0))
    for attempt in attempts:
        cut = False
        for name in files(os.path.join(logs, attempt), (".log",)):
            cut = add(grown, folder, os.path.join("logs", attempt, name), have) or cut
        if cut and attempt != attempts[-1]:
            grown.pop("job.log", None)
            break
    return grown


def add(grown: Json, folder: str, name: str, have: dict[str, int], limit: int = PART_BYTES) -> bool:
    """Add what a file has beyond what is known of it; whether there is more."""
    path = os.path.join(folder, name)
    try:
        size, known_size = os.path.getsize(path), have.get(name, 0)
        if size == known_size:
            return False
        with open(path, "rb") as file:
            file.seek(known_size if size > known_size else 0)
            data = file.read(limit)
    except OSError:
        return False
    grown[name] = [known_size if size > known_size else 0, base64.b64encode(data).decode()]
    return len(data) == limit


def files(folder: str, ends: tuple[str, ...]) -> list[str]:
    """Relative paths of the files below a folder with such names."""
    return [
        os.path.relpath(os.path.join(base, name), folder)
        for base, _, names in os.walk(folder)
        for name in sorted(names)
        if name.endswith(ends)
    ]


def listed(folder: str) -> list[str]:
    """The names in a folder; none where there is none."""
    try:
        return [name for name in os.listdir(folder) if name.partition("-")[2].isdigit()]
    except OSError:
        return []


LEFT = r"""
look() { grep -lzxE "SLURM_JOB_ID=($1)" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3; }
for _ in 1 2 3 4 5; do
  found=$(look "$1")
  [ -n "$found" ] || break
  kill -KILL $found 2>/dev/null
  sleep 0.2
done
echo "left $SLURMD_NODENAME $(look "$1" | wc -l)"
"""
"""Ends what is left of a job on a node and counts what still is: processes with its number in their environment."""
GONE = ("DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING", "FAIL", "UNKNOWN")
LOOK_S = 10


def left(request: Json) -> Json:
    """Processes of a job that has ended which are left on its nodes, null where nobody could look; how it was found.

    With proctrack/cgroup a job has not ended for Slurm before its control groups are empty, or it says "Kill task
    failed". Other plugins lose sight of daemons; there a small job looks, if the nodes are free for it at once.
    """
    nodes, counts = request["nodes"], dict.fromkeys(request["nodes"])
    node_records = run("scontrol", "show", "node", "-o", ",".join(nodes))
    config = run("scontrol", "show", "config").stdout
    if node_records.returncode or not config:
        return {"left": counts, "how": "scontrol does not describe the nodes"}
    up, stuck = [], []
    for line in node_records.stdout.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(NodeName|State)=(\S+)", line))
        if "Kill task failed" in line:
            stuck.append(fields["NodeName"])
        elif fields.get("NodeName") in counts and not any(mark in fields.get("State", "UNKNOWN") for mark in GONE):
            up.append(fields["NodeName"])
    unreachable = sorted(set(nodes) - set(up))
    reason = (
        "%s: Slurm does not reach the node, or could not end all of it there" % ", ".join(unreachable)
        if unreachable
        else ""
    )
    track = re.search(r"^ProctrackType\s*=\s*(\S+)", config, re.MULTILINE)
    if track and track[1] == "proctrack/cgroup":
        return {"left": {**counts, **dict.fromkeys(up, 0)}, "how": reason or "the job's control groups are empty"}
    if not up:
        return {"left": counts, "how": reason}
    options = [
        "--%s=%s" % (name, value)
        for name, value in (
            ("partition", request["partition"]),
            ("account", request["account"]),
            ("qos", request["qos"]),
        )
        if value and value != "(null)"
    ]
    count = str(len(up))
    done = run(
        "srun", "--immediate=%d" % LOOK_S, "--quiet", "--job-name=dtctl-left", "--time=1", "--chdir=/",
        "--nodelist=" + ",".join(up), "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1", *options,
        "sh", "-c", LEFT, "sh", "|".join(request["ids"]),
    )  # fmt: skip
    for line in done.stdout.splitlines():
        mark, _, values = line.partition(" ")
        node, _, number = values.partition(" ")
        if mark == "left" and node in counts and number.strip().isdigit():
            counts[node] = int(number)
    if any(counts[node] is None for node in up):
        error = (done.stderr.strip().splitlines() or ["srun printed nothing"])[-1]
        reason = "no job to count them could be started at once: %s" % error
    return {"left": counts, "how": reason or "counted on the nodes"}


OPS = {
    "offer": offer, "place": place, "fill": fill, "submit": submit, "test": test, "look": look, "state": standing,
    "left": left,
}  # fmt: skip
request = json.load(sys.stdin)
try:
    answer = OPS[request["op"]](request)
except OSError as exc:
    answer = {"error": "%s: %s" % (exc.filename or request["op"], exc.strerror)}
json.dump(answer, sys.stdout)
