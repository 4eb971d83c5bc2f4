"""The hosts' half of a run: what keeps it there, and what the control machine asks there. Standard library alone.

The keeper (`python3 -P -m keeper NODE_RANK`) is the first process of a run's container on each host: it holds the
host's lease, starts torchrun, exchanges heartbeats with the other keepers, ends the ranks when the run has to end, and
writes down what happened. It needs no control machine. The door (door.py) is what a control machine runs on a host over
SSH, with the host's own Python, to start, follow, stop and gather runs. Python 3.8 is enough for all of it.

Imports nothing but itself.

Documents, in the run's folder on each host (/var/lib/muster/runs/<id>/, in the container /muster/run):

plan.json       as launch/job/plan.py makes it; written by the door before the container starts
events.jsonl    what happened, one JSON object a line: {"time": unix seconds, "after": seconds since the keeper's start,
                "attempt": number, "event": name, ...}; written by the keeper. Names and their own fields: below
state.json      how things stand, about once a second while the run goes on: {"status": "starting" | "running" |
                "ending" | "ended" | "waiting" (not in the attempt), "attempt": its number, "hosts": [of the attempt, in
                rank order], "ranks": {"<rank>": {"state": "running" | "ended" | "failed" | "stopped", "phase",
                "step", "steps", "epoch", "epochs", "loss", "rate", "work": as in slow.py, "age": seconds
                since its last progress}}, "slow": the event below, while this host or a rank of it is slow, or null,
                "peers": {"<host>": seconds since its last heartbeat}, "waiting": what is waited for, or "",
                "beat": what the other keepers hear of this one (course.py), "time": unix seconds}
exit.json       how the run ended, as this host knows it; written by the keeper, last: {"status": "succeeded" |
                "failed" | "stopped", "exit_status": torchrun's, 128 + n for signal n, "cause": CAUSE or null,
                "causes": [CAUSE of all hosts], "stop": {"by", "killed": whether ranks outlived their grace} or null,
                "failures": [...] as in failure.json, of this host's last attempt, "attempt": the number of the newest
                one that it knows, "hosts": of that, "attempts": [how those before it ended, and that one if this host
                was in it: {"number", "hosts", "cause": CAUSE or null, "reached": the last step or null}], "given_up":
                why it was not started again, or "", "seconds": from the keeper's start, "time"}
promises.json   what the keeper has to know when it is started again: {"attempt", "votes", "restarts": course.py's,
                "starts": how often it was started, "began": unix seconds of the first time}; where a run may have
                another attempt. Written to the disk before others hear of it
failure.json    what torchrun's agent says of failed ranks; schema: train/start/agent.py
gathered.json   {"by", "time"}: a control machine has a copy of all this; written by the door
host.json       {"node_rank"}: which host of the plan this is; written by the door before the container starts
written.json    {"paths"}: files below workload/ that the script wrote; written by the door when the run is offered
output/         what the ranks and torchrun printed: output.py
stacks/         rank-<r>.txt: where a rank stood when it was declared hung

In the private folder, in the host's memory (/run/muster/<id>/, in the container /muster/private, read-only): the key of
the heartbeats, the secrets, and

hold            is there until all hosts have started and nothing speaks against the run: until then ranks wait
stop.json       a request to end the run: {"by": who and how, "grace": seconds or null, "time"}; written by the door
witnesses/      <id>.json: what a control machine that has the run in view says, as a keeper that only votes
                (course.py): {"number": one more each time, "words": its heartbeat}; written by the door

CAUSE           {"kind": see below, "host", "rank": number or null, "reason": one line, "other": the second host of a
                cut pair or "", "consequence": whether it only follows from another failure, "lines": what that rank
                printed last, "age": seconds since it happened, "final": whether it would happen again, were the ranks
                started anew, "unfit": whether it would on that host}; in exit.json with "after": seconds from this
                keeper's start to it, less than 0 for what another host's keeper saw before

Kinds of causes: "rank" (one failed), "launcher" (torchrun failed or was killed), "host_lost" (it is silent, or its
keeper is gone), "cut" (two hosts do not hear each other), "hang" (a rank is stopped, or makes no progress), "start" (a
host did not start in time), "lease" (it is another run's), "leaves" (its container was asked to end, and the others may
go on without it).

Events: "lease" (it is held; ranks may start), "returned" (the same of a keeper that was started again, and waits for
the next attempt), "attempt" (another one begins: hosts, master, left_out: {host: why},
because: CAUSE of the end of the one before), "given_up" (reason; alone: for this host, others may go on), "started"
(pids: {rank: pid}), "heard" (host: its first heartbeat), "failed" (a CAUSE, of this host or of another one),
"interface" (reason: this host's own network is down), "decider" (host: it decides from now on where half of the
attempt's hosts are left; "control:..." is a control machine), "stop" (by, grace: seconds), "waiting" (for), "killed"
(after_grace: whether ranks outlived theirs), "left" (pids that do not end), "slow" (host: this one, rank: number, or
null for all ranks of it, step: the run's, times: as long as the others its steps take, seconds and others_seconds: of a
step, reason: or "", over: whether it is no longer so; once for each change: slow.py), "rank_ended" (rank: it has ended
with status 0), "ranks_ended" (all of this host have; torchrun waits for the other hosts'), "ended" (status:
torchrun's), "output_failed" (reason), "exit" (what exit.json holds).
"""

#: Where the run's folder, the lease's folder and the private files (key, secrets) are in a container.
RUN_DIR = "/muster/run"
LEASE_DIR = "/muster/lease"  # in it the host's lease alone, not what waits for it
PRIVATE_DIR = "/muster/private"
WITNESSES = "witnesses"  # in the private folder
PROMISES = "promises.json"  # in the run's folder
PROJECT_DIR = "/muster/workload"  # the user's own folder, WORKLOAD or PROJECT, as the image holds it
FONTS_DIR = "/opt/muster/matplotlib"  # matplotlib's list of fonts, as the image holds it
WORKLOAD_DIR = "/workload"  # the copy of it in the run's folder in which a script runs

#: What a container may write to beside its run's folder; the image is read-only there. It goes with the run.
SCRATCH_DIR = "/tmp"
SCRATCH = ".tmp"  # in the run's folder

#: Who the keeper and the ranks are in a container, and on its host, as user and as group: one that no host has (systemd
#: keeps the numbers from 60706 to 61183 unused). With it goes all that a run may write.
USER_ID = 61000

#: What is Muster's own in a run's folder on a host, as described above; anything else is the trainer's or a script's.
OWN_NAMES = (
    *("plan.json", "host.json", "events.jsonl", "state.json", "exit.json", "failure.json", "gathered.json"),
    *("promises.json", "written.json", "output", "stacks", "workload", "workload.copied"),
)

#: torchrun's rendezvous on the master host, chosen free at each start of an attempt.
MASTER_PORTS = (29500, 29599)

#: How long a host that has started waits for the others, and for the control machine to let the run go.
HELD_SECONDS = 300
