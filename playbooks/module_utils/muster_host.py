"""What Muster's modules share about the machine they run on: commands with a time limit, and limits of cgroups.

Runs on bare hosts: standard library alone, Python 3.8 and later. NICs are in muster_nics, GPUs in muster_gpus.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# sudo's secure_path and a bare sshd both may leave these out; Podman keeps helpers in the two before the last.
SEARCH_PATH = (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/libexec/podman:/usr/lib/podman:/opt/rocm/bin"
)


@dataclass(frozen=True)
class Result:
    """What a command said. rc 127: it is not installed; rc 124: it was ended after its time limit."""

    rc: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The last line of its error output, for messages."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.rc}"

    def checked(self, what: str) -> str:
        """What the command printed. Raises RuntimeError if it failed; what: the command, for people."""
        if self.rc != 0:
            raise RuntimeError(f"`{what}`: {self.complaint}")
        return self.out


def too_old(printed: str, oldest: tuple[int, ...]) -> str:
    """The version that a program has printed, if it is older than that; empty where it is not, or says none. Pure."""
    found = re.search(r"\d+(?:\.\d+)+", printed)
    return found.group(0) if found and tuple(map(int, found.group(0).split("."))) < oldest else ""


def find_command(name: str) -> str | None:
    """The path of a command, also where root's PATH is short."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":" + SEARCH_PATH)


def run(command: Sequence[str], timeout: float = 30.0) -> Result:
    """Runs a command in the C locale and waits for at most `timeout` seconds. Never raises."""
    path = find_command(command[0])
    if path is None:
        return Result(127, "", f"{command[0]}: not installed")
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", "") + ":" + SEARCH_PATH}
    try:
        words = [path, *command[1:]]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=environment, cwd="/", check=False
        )
    except subprocess.TimeoutExpired:
        return Result(124, "", f"{' '.join(command)}: no answer within {timeout:.0f} s")
    except OSError as error:
        return Result(126, "", f"{command[0]}: {error}")
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def read(path: str | Path) -> str | None:
    """A file's text without the white space around it; None if it cannot be read (sysfs answers EINVAL for much)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def head(path: str | Path, count: int) -> str:
    """The first bytes of a file as text; empty if it cannot be read. Of /proc/cpuinfo the whole costs time by core."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(count).decode(errors="replace")
    except OSError:
        return ""


def write_atomically(path: Path, text: str) -> None:
    """Writes through a temporary name, so that a reader sees the old text or the new one. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.muster-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    os.replace(temporary, path)


def parse_os_release(text: str) -> dict[str, str]:
    """/etc/os-release as {"id", "version", "like"}; empty strings for what it does not say."""
    pairs = (line.partition("=") for line in text.splitlines())
    values = {key.strip(): value.strip().strip("\"'") for key, equals, value in pairs if equals}
    return {"id": values.get("ID", ""), "version": values.get("VERSION_ID", ""), "like": values.get("ID_LIKE", "")}


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """/proc/self/cgroup as {controller: path}; the unified hierarchy has the key ""."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def parse_cpu_quota(cpu_max: str | None, cfs_quota: str | None, cfs_period: str | None) -> float | None:
    """Cores that one cgroup allows, from cpu.max (version 2) or cpu.cfs_* (version 1); None is no limit."""
    figures = cpu_max.split() if cpu_max else [cfs_quota or "", cfs_period or ""]
    if len(figures) != 2 or not all(figure.isdigit() and int(figure) > 0 for figure in figures):
        return None  # "max", -1
    return int(figures[0]) / int(figures[1])


def parse_memory_limit(text: str | None) -> int | None:
    """Bytes from memory.max or memory.limit_in_bytes; None is no limit (version 1 writes about 2**63)."""
    if text is None or not text.isdigit() or int(text) >= 1 << 60:
        return None
    return int(text)


def _cgroup_folders(mount: str, path: str) -> list[Path]:
    """The cgroup's folder and all above it; in a container the host's path may not exist: then the mount alone."""
    folders = [Path(mount)]
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return [folder for folder in folders if folder.is_dir()]


def _cgroups(controller: str, version_1: str) -> list[Path]:
    """Folders of the cgroups that limit this process. version_1: a file by which that version's mount is known."""
    paths = parse_cgroup_paths(read("/proc/self/cgroup") or "")
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folders = _cgroup_folders("/sys/fs/cgroup", paths.get("", "/")) if unified else []
    if controller in paths:
        for mount in (f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup/cpu,cpuacct"):
            if Path(mount, version_1).exists():
                folders += _cgroup_folders(mount, paths[controller])
                break
    return folders


def usable_cores() -> int:
    """Cores that a process started here may use: by CPU affinity and by quotas of cgroups; whole, at least 1."""
    names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    folders = _cgroups("cpu", "cpu.cfs_quota_us")
    quotas = (parse_cpu_quota(*(read(folder / name) for name in names)) for folder in folders)
    return max(1, int(min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])))


def usable_memory() -> int:
    """Bytes of memory: what the machine has, or what its cgroups allow if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    folders = _cgroups("memory", "memory.limit_in_bytes")
    texts = (read(folder / name) for folder in folders for name in ("memory.limit_in_bytes", "memory.max"))
    limits = map(parse_memory_limit, texts)
    return min([total, *(limit for limit in limits if limit is not None)])


def threads_max() -> int | None:
    """How many threads all processes of the machine can have together, as far as the kernel says it."""
    texts = (read(f"/proc/sys/kernel/{name}") for name in ("threads-max", "pid_max"))
    return min((int(text) for text in texts if text and text.isdigit()), default=None)


def available_memory() -> int | None:
    """Bytes that programs can still get without swapping: MemAvailable, within what the cgroups allow."""
    found = re.search(r"^MemAvailable:\s*(\d+)", read("/proc/meminfo") or "", re.MULTILINE)
    return min(usable_memory(), 1024 * int(found.group(1))) if found else None


def existing(path: str | Path) -> str:
    """The path, or its nearest parent that exists."""
    found = os.path.abspath(path)
    while not os.path.exists(found):  # false also below a folder that this user may not enter
        found = os.path.dirname(found)
    return found


def disk(path: str | Path) -> tuple[int, int]:
    """(free, total) bytes of the file system that holds a path, or would hold it."""
    state = os.statvfs(existing(path))
    return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


def read_stat() -> str:
    """The first lines of /proc/stat, for busy_part; "" where it cannot be read."""
    return head("/proc/stat", 4096)


def parse_ticks(stat: str) -> tuple[int, int] | None:
    """(ticks of all processors since the start, of these those with nothing to do) from /proc/stat."""
    words = stat.split("\n", 1)[0].split()
    if len(words) < 6 or words[0] != "cpu" or not all(word.isdigit() for word in words[1:]):
        return None
    ticks = [int(word) for word in words[1:9]]  # the guests' that follow are also in user and nice
    return sum(ticks), ticks[3] + ticks[4]  # idle, and waiting for a disk


def busy_part(before: str, after: str) -> float | None:
    """The share of the machine's processor time in use between two readings of /proc/stat; None where not readable."""
    first, last = parse_ticks(before), parse_ticks(after)
    if first is None or last is None or last[0] <= first[0]:
        return None
    return round(min(1.0, max(0.0, 1 - (last[1] - first[1]) / (last[0] - first[0]))), 3)
