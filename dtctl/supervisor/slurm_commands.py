"""Execution of Slurm's commands on the machine that has them, one request at a time. Stdlib only, Python 3.8.

Request and answer are JSON, in as many frames as needed. The program is started twice a second while a job runs, so
modules with slow imports are imported only by the requests that need them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from datetime import datetime

from dtctl.supervisor import frames, run_workdir
from dtctl.supervisor.messages.base import Message, index_message_types
from dtctl.supervisor.messages.slurm import SlurmRequest
from dtctl.supervisor.requests import NodeRequests

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

FIELDS = (
    "JobState", "Reason", "StartTime", "EndTime", "NodeList", "ExitCode", "Restarts", "Partition", "TimeLimit",
    "Account", "QOS",
)  # fmt: skip
PART_BYTES = 1 << 20
"""Most bytes of a file in one answer."""
EVENTS_BYTES = 1 << 26
"""Most bytes of the record of events in one answer, which suffice for some weeks."""


ASK_S = 15.0
"""Seconds between two requests to Slurm's controller by all followers of a run together."""
ANSWER_S = 10
"""Seconds until a controller that has not reported a job's state counts as down."""


def run(
    *argv: str, env: dict[str, str] | None = None, text: str = "", limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with `text` as its standard input; the exit code is 124 after the time limit."""
    try:
        return subprocess.run(argv, env=env, input=text, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", "%s did not answer within %d s" % (argv[0], limit_s or 0))


def list_partitions(_: Json) -> Json:
    """Return the partitions, and each node of each: name, partition, state, generic resources, features."""
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


def describe_submission_site(request: Json) -> Json:
    """Return what `list_partitions` does, and the path of a run's folder, if jobs can be submitted here."""
    if shutil.which("sbatch") is None:
        return {"error": "sbatch: not found"}
    folder = os.path.join(os.path.realpath(os.path.expanduser(request["workdir"])), "slurm", request["run"])
    return {"folder": folder, **list_partitions(request)}


def fill_run_folder(request: Json) -> Json:
    """Write files and a copy of the code into the run's folder, so that an edit does not change a waiting job.

    The folder is made, private to its user; it exists only if the control machine has copied the code into it.
    """
    folder, code = request["folder"], os.path.expanduser(request["code"])
    if code and not os.path.isdir(code):
        return {"error": "%s does not exist, and `job.files.push` is false" % code}
    os.makedirs(folder, exist_ok=request["pushed"] and not code)
    try:
        run_workdir.prepare_working_folder(
            folder, code, request["outputs"], request["earlier"], request["pushed"], may_mount=False
        )
    except run_workdir.WorkdirTooLarge as exc:
        return {"error": "%s cannot be copied for a run: %s; name a smaller folder as `job.files.root`" % (code, exc)}
    for name in request["folders"]:
        os.mkdir(os.path.join(folder, name))
    for name, text in request["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    for name, encoded in request["binary"].items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(base64.b64decode(encoded))
    for name in request["folders"]:
        run_workdir.copy_record(folder, os.path.join(folder, name))
    return {}


def count_run_outputs(request: Json) -> Json:
    """Return number and bytes of the files that a run has made or changed, or of the files below some paths."""
    put_out = run_workdir.summarize_outputs(request["folder"], request["paths"])
    return {"files": put_out.files, "bytes": put_out.bytes}


def submit_batch_file(request: Json) -> Json:
    """Fill the run's folder, test its batch file and submit it.

    Secrets are part of the request, so that no argument list shows them.
    """
    filled = fill_run_folder(request)
    if filled:
        return filled
    file = os.path.join(request["folder"], "job.sbatch")
    os.umask(int(os.environ["DTCTL_UMASK"], 8))  # Slurm gives the umask of sbatch to the job.
    with open(file, encoding="utf-8") as opened:
        env, ignored, used = build_sbatch_environment(opened.read())
    env.update(request["env"])
    variables = {"ignored": ignored, "used": used}
    # Without a test, Slurm accepts a job that can never start, for more nodes than there are, and lets it wait. There
    # is no test if nodes are only temporarily away: it would report that the job can never start.
    for option in ("--test-only", "--parsable") if request["test"] else ("--parsable",):
        done = run("sbatch", option, file, env=env)
        if done.returncode and option == "--test-only":
            return {"code": done.returncode, "said": done.stderr, **variables}
    # A site's own sbatch may print more than the number, or fail after Slurm has taken the job.
    numbers = re.findall(r"^(\d+)(?:;\S+)?\s*$", done.stdout, re.MULTILINE)
    if done.returncode or len(numbers) != 1:
        numbers = find_submitted_jobs({"script": file, "folders": ()})["jobs"] or ([] if done.returncode else numbers)
    if not numbers:
        return {"code": done.returncode or 1, "said": done.stderr or done.stdout, **variables}
    return {"code": 0, "job": numbers[-1], **variables}


COMMANDS = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")
"""Variables that select the Slurm cluster."""
DEFAULTS = {
    "SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos", "SBATCH_TIMELIMIT": "time",
    "SBATCH_RESERVATION": "reservation", "SBATCH_CONSTRAINT": "constraint", "SBATCH_WCKEY": "wckey",
    "SBATCH_CLUSTERS": "clusters",
}  # fmt: skip
"""Variables with which sites and users set options of every job, and these options."""


def build_sbatch_environment(text: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the variables for sbatch, the names of removed ones (they override the batch file), and of used ones.

    Variables of an allocation around this process (SLURM_*, SRUN_*) would affect the new job, and are left out without
    a report.
    """
    env: dict[str, str] = {}
    ignored: list[str] = []
    used: list[str] = []
    options = set(re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE))
    for name, value in os.environ.items():
        if name == "DTCTL_UMASK":
            continue
        if name.startswith("SBATCH_"):
            counts = name in DEFAULTS and DEFAULTS[name] not in options
            (used if counts else ignored).append(name)
            if not counts:
                continue
        elif name == "SLURM_EXPORT_ENV":
            ignored.append(name)
            continue
        elif name.startswith(("SLURM_", "SRUN_", "SALLOC_")) and name not in COMMANDS:
            continue
        env[name] = value
    return env, sorted(ignored), sorted(used)


def test_batch_file(request: Json) -> Json:
    """Return the result of Slurm's test of a batch file, without writing the file to a disk."""
    done = run("sbatch", "--test-only", env=build_sbatch_environment(request["text"])[0], text=request["text"])
    return {"code": done.returncode, "said": done.stderr}


def read_job_progress(request: Json) -> Json:
    """Return the state of the job, and the parts of its files that the requester does not have."""
    job = find_known_state(request)
    return {"job": job, "files": collect_new_output(request["folder"], request["have"])}


def read_job_status(request: Json) -> Json:
    """Return the state of the job."""
    return {"job": find_known_state(request)}


def find_known_state(request: Json) -> Json:
    """Return the job's state from Slurm's last answer to any follower of the run, or from a new one.

    The controller gets one request every 15 s for each run, whatever the number of machines. Urgent requests are sent
    sooner, up to four times in a minute: when the job's files show that it begins or ends, or when a user ends it.
    """
    job, folder = request["job"], request.get("folder", "")
    if not folder:
        return query_job_state(job)
    path, now = os.path.join(folder, "slurm-state.json"), time.time()
    known = _read_state(path)
    if known.get("job") != job:
        known = {}
    asked = [at for at in known.get("asked", ()) if now - 60 < at <= now]
    if asked:
        if "state" in known and now - asked[-1] < _choose_request_interval(request, known["state"], len(asked)):
            return dict(known["state"])
        # This time prevents further requests by other processes meanwhile.
        write_state(path, {**known, "asked": [*asked, now]})
    found = query_job_state(job)
    write_state(path, {"job": job, "asked": [*asked, now], "state": found})
    return found


def _choose_request_interval(request: Json, state: Json, requests: int) -> float:
    """Return the least seconds between two requests, from the last state and the requests of the last minute."""
    begins = state.get("JobState") == "PENDING" and os.path.exists(os.path.join(request["folder"], "job.log"))
    if requests >= 4 or not (begins or request.get("urgent")):
        return ASK_S
    return 0.3 if begins else 1.0


def _read_state(path: str) -> Json:
    """Return the content of a small file; empty if it cannot be read."""
    try:
        # The file is opened, since a network file system may show an old `stat` result for a long time.
        with open(path, encoding="utf-8") as file:
            state: Json = json.load(file)
    except (OSError, ValueError):
        return {}
    return state


def write_state(path: str, document: Json) -> None:
    """Replace a small file; if it cannot be written, the state is requested again later."""
    try:
        fd = os.open("%s.%d" % (path, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.rename("%s.%d" % (path, os.getpid()), path)
    except OSError:
        pass


def query_job_state(job: str) -> Json:
    """Return fields of `scontrol show job`, or of sacct if the controller no longer has the job; empty: neither has."""
    done = run("scontrol", "show", "job", "-o", job, limit_s=ANSWER_S)
    if done.returncode == 0 and done.stdout.strip():
        fields = dict(re.findall(r"(?:^|\s)(%s)=(\S*)" % "|".join(FIELDS), done.stdout.splitlines()[0]))
        fields["NodeList"] = fields.get("NodeList") or "(null)"  # The field is empty if the job never had nodes.
        # A heterogeneous job has a line for each component; all fields except the nodes come from the first.
        lists = re.findall(r"\sNodeList=(\S+)", done.stdout)
        if lists and "(null)" not in lists:
            fields["nodes"] = run("scontrol", "show", "hostnames", ",".join(lists)).stdout.split()
        fields["ids"] = re.findall(r"(?:^|\n)JobId=(\d+)", done.stdout)
        # Slurm prints the local time of this machine; the requester may be in another time zone.
        fields["start"], fields["end"] = (
            parse_slurm_time(fields.get("StartTime", "")),
            parse_slurm_time(fields.get("EndTime", "")),
        )
        return fields
    if "Invalid job id" not in done.stderr:
        return {"JobState": "UNKNOWN", "Reason": (done.stderr.strip().splitlines() or ["scontrol printed nothing"])[-1]}
    try:
        accounting = run("sacct", "-j", job, "-X", "-n", "-P", "-o", "State,ExitCode,End,NodeList", limit_s=ANSWER_S)
    except OSError:
        return {"JobState": "FORGOTTEN"}
    job_state, code, end, nodes = (accounting.stdout.strip().splitlines() or ["|||"])[-1].split("|")[:4]
    if not job_state:
        return {"JobState": "FORGOTTEN"}
    known = {"JobState": job_state.split()[0], "ExitCode": code, "end": parse_slurm_time(end)}
    if nodes == "None assigned":
        return {**known, "NodeList": "(null)"}
    return {**known, "nodes": run("scontrol", "show", "hostnames", nodes).stdout.split()}


def find_submitted_jobs(request: Json) -> Json:
    """Return the numbers of the jobs that were submitted from a batch file; null if Slurm does not answer.

    Jobs that Slurm no longer lists are found by the first line of their output.
    """
    done = run("scontrol", "show", "job", "-o", limit_s=ANSWER_S)
    if done.returncode:
        return {"jobs": None}
    jobs = set()
    for line in done.stdout.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(JobId|ArrayJobId)=(\d+)", line))
        command = re.search(r"\sCommand=(.*?) WorkDir=", line)
        if command and command[1] == request["script"]:
            jobs.add(fields.get("ArrayJobId", fields["JobId"]))
    folder = os.path.dirname(request["script"])
    for name in ("job.log", *(os.path.join(each, "job.log") for each in request["folders"])):
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                told = re.match(r"dtctl: job (\d+)\S* of run ", file.readline(4096))
        except OSError:
            continue
        if told:
            jobs.add(told[1])
    return {"jobs": sorted(jobs)}


def parse_slurm_time(text: str) -> float | None:
    """Return the seconds since the epoch of a time in Slurm's form; None if it is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def collect_new_output(folder: str, have: dict[str, int]) -> Json:
    """Return the new parts of files that have grown or started again: relative path -> [offset, bytes in base64].

    The job's log is left out while logs of earlier attempts are incomplete, since it reports the next attempt's start.
    """
    grown: Json = {}
    add_grown_file(grown, folder, "job.log", have)
    add_grown_file(grown, folder, "metrics.jsonl", have)
    logs = os.path.join(folder, "logs")
    attempts = sorted(list_numbered_names(logs), key=lambda name: int(name.partition("-")[2] or 0))
    for attempt in attempts:
        cut = False
        for name in list_files_by_suffix(os.path.join(logs, attempt), (".log",)):
            cut = add_grown_file(grown, folder, os.path.join("logs", attempt, name), have) or cut
        if cut and attempt != attempts[-1]:
            grown.pop("job.log", None)
            break
    grown.update(collect_control_news(folder, have))
    return grown


WHOLE = ("plan.json", "ledger.json", "attempt.json", "attempts.jsonl")
"""Records of the launcher inside of a job that are replaced as a whole and do not grow."""


def collect_control_news(folder: str, have: dict[str, int]) -> Json:
    """Return the new parts of the records of the launcher inside of the job, as in `collect_new_output`.

    The events are read first and left out while other files are incomplete, so that output precedes its events.
    """
    grown: Json = {}
    events, cut = "control/events.jsonl", False
    add_grown_file(grown, folder, events, have, EVENTS_BYTES)
    for each in list_files_by_suffix(os.path.join(folder, "control"), (".log", ".times", ".txt", ".json", ".jsonl")):
        name = "control/" + each
        if os.path.basename(name) in WHOLE:
            add_replaced_file(grown, folder, name, have)
        elif name != events:
            cut = add_grown_file(grown, folder, name, have) or cut
    if cut:
        grown.pop(events, None)
    return grown


def add_replaced_file(grown: Json, folder: str, name: str, have: dict[str, int]) -> None:
    """Add the whole contents of a file that was replaced since, with the modification time in place of an offset."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            when = os.fstat(file.fileno()).st_mtime_ns
            if when != have.get(name):
                grown[name] = [when, base64.b64encode(file.read()).decode()]
    except OSError:
        return


def add_grown_file(grown: Json, folder: str, name: str, have: dict[str, int], limit: int = PART_BYTES) -> bool:
    """Add the part of a file that the requester does not have; return whether there is more."""
    path = os.path.join(folder, name)
    try:
        size, known_size = os.path.getsize(path), have.get(name, 0)
        if size == known_size and name in have:
            return False
        with open(path, "rb") as file:
            file.seek(known_size if size > known_size else 0)
            data = file.read(limit)
    except OSError:
        return False
    grown[name] = [known_size if size > known_size else 0, base64.b64encode(data).decode()]
    return len(data) == limit


def list_files_by_suffix(folder: str, ends: tuple[str, ...]) -> list[str]:
    """Return the relative paths of the files below a folder whose names end in one of `ends`."""
    return [
        os.path.relpath(os.path.join(base, name), folder)
        for base, _, names in os.walk(folder)
        for name in sorted(names)
        if name.endswith(ends)
    ]


def list_numbered_names(folder: str) -> list[str]:
    """Return the names in a folder; empty if it does not exist."""
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
"""Shell text that kills and then counts the processes of a job on a node, which have its number as a variable."""
GONE = ("DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING", "FAIL", "UNKNOWN")
LOOK_S = 20
COMPLETING_S = 30
"""Most seconds until the nodes of an ended job are free, after the end of its processes and the site's epilog."""
SSH = ("BatchMode=yes", "ConnectTimeout=5", "StrictHostKeyChecking=yes", "ForwardAgent=no", "ForwardX11=no")
"""Options of ssh: no prompts, and only nodes with a known host key."""


def count_left_processes(request: Json) -> Json:
    """Return the number of an ended job's processes left on each node (null: unknown), and the way of the count.

    A small job counts them if the nodes are free at once. Slurm's report of the job's end does not show this number.
    """
    nodes, counts = request["nodes"], dict.fromkeys(request["nodes"])
    records = _wait_for_completion(nodes)
    config = run("scontrol", "show", "config").stdout
    if records.returncode or not config:
        return {"left": counts, "how": "scontrol does not describe the nodes"}
    up = [node for node in _list_reachable_nodes(records.stdout) if node in counts]
    unreachable = sorted(set(nodes) - set(up))
    reason = ""
    if unreachable:
        reason = "%s: Slurm does not reach the node, or could not end all of it there" % ", ".join(unreachable)
    if not up:
        return {"left": counts, "how": reason}
    done = _run_counting_job(request, up)
    for line in done.stdout.splitlines():
        mark, _, values = line.partition(" ")
        node, _, number = values.partition(" ")
        if mark == "left" and node in counts and number.strip().isdigit():
            counts[node] = int(number)
    blind = [node for node in up if counts[node] is None]
    if not blind:
        return {"left": counts, "how": reason or "counted on the nodes"}
    counts.update(count_over_ssh(blind, "|".join(request["ids"])))
    if all(counts[node] is not None for node in blind):
        return {"left": counts, "how": reason or "counted on the nodes, over SSH"}
    error = (done.stderr.strip().splitlines() or ["srun printed nothing"])[-1]
    reason = "no job to count them could be started at once: %s" % error
    if re.search(r"^ProctrackType\s*=\s*proctrack/cgroup", config, re.MULTILINE):
        reason += "; Slurm says that the job's control groups are empty"
    return {"left": counts, "how": reason}


def _wait_for_completion(nodes: list[str]) -> subprocess.CompletedProcess[str]:
    """Return Slurm's records of the nodes of an ended job, once none of them still cleans up after a job."""
    deadline, wait_s = time.monotonic() + COMPLETING_S, 0.5
    while True:
        records = run("scontrol", "show", "node", "-o", ",".join(nodes))
        if not re.search(r"\sState=\S*COMPLETING", records.stdout) or time.monotonic() >= deadline:
            return records
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 4.0)  # Each call of scontrol loads all nodes of the cluster.


def _list_reachable_nodes(records: str) -> list[str]:
    """Return the nodes that Slurm reaches, and on which it could end all processes."""
    reachable = []
    for line in records.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(NodeName|State)=(\S+)", line))
        state = fields.get("State", "UNKNOWN")
        is_gone = "Kill task failed" in line or any(mark in state for mark in GONE)
        if "NodeName" in fields and not is_gone:
            reachable.append(fields["NodeName"])
    return reachable


def _run_counting_job(request: Json, nodes: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a job that prints the number of left processes of each node, if it can start at once."""
    names = [name for name in ("partition", "account", "qos") if request[name] not in (None, "", "(null)")]
    options = ["--%s=%s" % (name, request[name]) for name in names]
    count = str(len(nodes))
    return run(
        "srun", "--immediate=%d" % LOOK_S, "--quiet", "--job-name=dtctl-left", "--time=1", "--chdir=/",
        "--nodelist=" + ",".join(nodes), "--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1", *options,
        "sh", "-c", LEFT, "sh", "|".join(request["ids"]),
    )  # fmt: skip


def count_over_ssh(nodes: list[str], ids: str) -> dict[str, int | None]:
    """Return the same numbers over SSH, if the first node accepts a login; null for a node without one."""
    from concurrent.futures import ThreadPoolExecutor

    if not nodes or shutil.which("ssh") is None:
        return {}
    options = [word for option in SSH for word in ("-o", option)]

    def look_at(node: str) -> int | None:
        done = run("ssh", *options, node, "env SLURMD_NODENAME=%s sh -s '%s'" % (node, ids), text=LEFT, limit_s=LOOK_S)
        told = re.search(r"^left \S+ (\d+)$", done.stdout, re.MULTILINE)
        return int(told[1]) if told else None

    counts = {nodes[0]: look_at(nodes[0])}
    if counts[nodes[0]] is None:  # A site that refuses logins may count failed ones.
        return counts
    with ThreadPoolExecutor(32) as pool:
        looks = {node: pool.submit(look_at, node) for node in nodes[1:]}
    return {**counts, **{node: found.result() for node, found in looks.items()}}


OPS = {
    "offer": list_partitions,
    "place": describe_submission_site,
    "submit": submit_batch_file,
    "find": find_submitted_jobs,
    "test": test_batch_file,
    "look": read_job_progress,
    "state": read_job_status,
    "left": count_left_processes,
    "outputs": count_run_outputs,
}


class SlurmRequests(NodeRequests):
    """Answers to a control machine that submits or follows a job."""

    KINDS = index_message_types(SlurmRequest)
    IDLE_LIMIT_S = 60.0

    def answer(self, request: Message) -> int:
        """Answer one request, which is the last one."""
        asked = b""
        while isinstance(request, SlurmRequest) and len(asked) < request.bytes:
            frame = self.link.receive()
            if frame is None:
                raise frames.BrokenFrame("the stream ended inside a request")
            asked += frame[2]
        answer = json.dumps(answer_request(json.loads(asked.decode()))).encode()
        self.link.send_bytes(answer)
        return 0


def answer_request(request: Json) -> Json:
    """Answer a request by its function in `OPS`."""
    os.environ["SLURM_TIME_FORMAT"] = "standard"
    try:
        return OPS[request["op"]](request)
    except OSError as exc:
        return {"error": "%s: %s" % (exc.filename or request["op"], exc.strerror)}
