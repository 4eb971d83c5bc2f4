"""The user's inventory, read through ansible-inventory and validated whole. Not for facts learned from hosts.

Nothing here connects to a host. Every problem found is reported, not only the first.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keeper import engines
from launch.cli.refusal import Problem, Refusal, refuse
from launch.files import ROOT

#: Muster's own variables, each with what it takes. Everything that starts with `ansible_` is Ansible's.
VARIABLES = {
    "nproc_per_node": "a whole number of ranks, 1 or more",
    "gpus": "a list of GPU indices, such as [0, 2]",
    "train_network": "a network in CIDR form, such as 10.78.0.0/24",
    "train_interface": "the name of a network interface of this host",
    "data_dir": "an absolute path on the host",
    "airgap": "true or false",
    "package_proxy": "the URL of an HTTP proxy, such as http://proxy.example.org:3128",
    "firewall": "true or false",
    "train_vpn": "wireguard",
    "rootless": "true or false",
    "install_driver": "true or false",
    "container_engine": "auto, podman or docker",
    "base_image": "the reference of an image, or the absolute path of an archive of one on the machine that builds",
    "build_on": "control or the name of a host of this inventory",
}

#: Those that are true or false. In an INI file a value such as `true` is a text; Ansible takes these words for it.
SWITCHES = ("airgap", "firewall", "install_driver", "rootless")
TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)

#: Ansible's variables for a login and for becoming root (`ansible-doc -t connection ssh`, `-t become sudo`, and the
#: table MAGIC_VARIABLE_MAPPING in ansible/constants.py). What is spelt nearly like one of them is taken for a mistake.
_CONNECTION_VARIABLES = """
become become_exe become_flags become_method become_pass become_password become_user
connection connection_user control_path control_path_dir host host_key_checking
password pipelining port private_key private_key_file private_key_passphrase python_interpreter
scp_executable scp_extra_args sftp_batch_mode sftp_executable sftp_extra_args shell_executable shell_type
ssh_args ssh_common_args ssh_executable ssh_extra_args ssh_host ssh_host_key_checking
ssh_pass ssh_password ssh_password_mechanism ssh_pipelining ssh_pkcs11_provider ssh_port
ssh_private_key ssh_private_key_file ssh_private_key_passphrase ssh_retries ssh_timeout ssh_transfer_method
ssh_use_tty ssh_user ssh_verbosity sshpass_prompt
sudo_chdir sudo_exe sudo_flags sudo_pass sudo_user timeout user
"""
CONNECTION_VARIABLES = frozenset(f"ansible_{name}" for name in _CONNECTION_VARIABLES.split())

#: An image's name with its registry, tag or digest; Podman itself looks closer.
REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9.:-]*(?:/[a-z0-9._-]+)*(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?")

#: As build_on: the machine where make is typed.
CONTROL = "control"

#: The group of hosts that wait in each run, and take the place of one that is lost.
SPARES = "spares"

VAULT_FIX = "name the file that holds the vault's password: `export ANSIBLE_VAULT_PASSWORD_FILE=...`"


@dataclass(frozen=True)
class Target:
    """How to reach one host over SSH: as the inventory says, and where it says nothing, as OpenSSH would."""

    name: str
    address: str
    port: int = 22
    user: str | None = None
    key_file: str | None = None
    jump: str | None = None  # jump hosts in their order, as `ssh -J` takes them
    proxy_command: str | None = None
    python: str = "python3"
    sudo_password: str | None = field(default=None, repr=False)
    rootless: bool = False  # nothing there is done as root: the user's own Podman


@dataclass(frozen=True)
class Host:
    """One host of the inventory: how to reach it and what the user set for it."""

    target: Target
    settings: dict[str, Any]
    spare: bool = False  # it is in the group of this name: it takes the place of a host that is lost in a run

    @property
    def name(self) -> str:
        return self.target.name


@dataclass(frozen=True)
class Inventory:
    """A validated inventory, hosts in inventory order (which is rank order)."""

    path: Path
    hosts: tuple[Host, ...]
    sha256: str
    base_image: str = ""  # what the training image stands on; empty: Muster's own base
    build_on: str = ""  # the host that builds images; empty: this machine
    train_vpn: str = ""  # what training goes through between hosts; empty: the network itself


def build_name(path: Path) -> str:
    """The name of an inventory's folder under build/: `inventory/lab` -> `lab`, `inventory/hosts.yml` -> `hosts`."""
    full = path.resolve()
    home = (ROOT / "inventory").resolve()
    if full.is_relative_to(home) and full != home:
        return "-".join(full.relative_to(home).with_suffix("").parts)
    return f"{full.stem}-{hashlib.sha256(str(full).encode()).hexdigest()[:6]}"


def known_hosts_path(path: Path) -> Path:
    """The one known_hosts of an inventory: inside its folder, or beside its file."""
    return (path if path.is_dir() else path.parent) / "known_hosts"


def source_files(path: Path) -> list[Path]:
    """The files that make up an inventory: the file (or folder) and its group_vars and host_vars."""
    roots = [path] if path.is_dir() else [path, path.parent / "group_vars", path.parent / "host_vars"]
    files = [f for root in roots for f in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [f for f in files if f.is_file() and not f.name.startswith(("known_hosts", "id_", "."))]


def digest(path: Path) -> str:
    """SHA-256 over an inventory's files: what the cluster map is compared with to tell whether it is stale."""
    total = hashlib.sha256()
    for file in source_files(path):
        total.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def ansible_environment() -> dict[str, str]:
    """The environment in which every Ansible command of ours runs."""
    return os.environ | {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_DUPLICATE_YAML_DICT_KEY": "error",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def read(path: Path) -> Inventory:
    """Read and validate an inventory. Raises Refusal, naming every bad thing in it, its place and its fix."""
    if not path.exists():
        fix = "write one (inventory/hosts.yml is a commented example), or `make lab` to get one on this machine"
        raise refuse(str(path), "there is no such inventory", fix)
    raw = _list_inventory(path)
    names = _names_in_order(raw)
    if not names:
        raise refuse(str(path), "the inventory holds no host", "list at least one host under `all: hosts:`")
    spares = set(_names_in_order(raw, SPARES))
    if spares.issuperset(names):
        raise refuse(str(path), f"all hosts are in the group `{SPARES}`", "leave at least one host out of it")
    hostvars = raw.get("_meta", {}).get("hostvars", {})
    hosts: list[Host] = []
    problems = [*_twice_in_ini(path), *_misspelt_spares(str(path), raw, spares)]
    decrypted: dict[str, str] = {}
    for name in names:
        where = f"{path}, host {name}"
        try:
            variables = _decrypt(where, hostvars.get(name, {}), decrypted)
            problems += check_variables(str(path), name, variables)
            hosts.append(replace(_host(path, name, variables), spare=name in spares))
        except Refusal as refusal:
            problems += refusal.problems
        except ValueError as error:
            problems.append(Problem(where, str(error), "correct this value"))
    problems += check_distinct(str(path), [host.target for host in hosts])
    base_image, build_on = (_set_once(path, hosts, name, problems) for name in ("base_image", "build_on"))
    builder = "" if build_on == CONTROL else build_on
    if builder and builder not in names:
        what = f"`build_on: {builder}` names no host of this inventory{_did_you_mean(builder, names)}"
        problems.append(Problem(str(path), what, f"name one of {', '.join(names)}, or `{CONTROL}`: this machine"))
    if any(host.name == builder and host.target.rootless for host in hosts):
        what = f"`build_on: {builder}` and `rootless: true` there: building images needs root"
        problems.append(Problem(str(path), what, "name another host"))
    train_vpn = _set_once(path, hosts, "train_vpn", problems, "both ends need it")
    if train_vpn and (without := [host.name for host in hosts if host.target.rootless]):
        what = f"`train_vpn`, and `rootless: true` on {', '.join(without)}: a VPN needs root"
        problems.append(Problem(str(path), what, "leave out one of them"))
    if problems:
        raise Refusal(merge_problems(problems))
    return Inventory(path, tuple(hosts), digest(path), base_image, builder, train_vpn)


def _set_once(
    path: Path, hosts: list[Host], name: str, problems: list[Problem], why: str = "they run one image"
) -> str:
    """A setting that all hosts share; empty: not set. Adds a problem where they differ."""
    values = {str(host.settings.get(name, "")) for host in hosts}
    if len(values) > 1:
        what = f"hosts differ in `{name}`: {', '.join(value or 'none' for value in sorted(values))}"
        problems.append(Problem(str(path), what, f"set it once, under `vars:` of all hosts: {why}"))
    return min(values, default="")


def merge_problems(problems: list[Problem]) -> list[Problem]:
    """The same problem on several hosts (a group variable, say) as one problem that lists them. Pure."""
    places: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        places.setdefault((problem.what, problem.fix), []).append(problem.where)
    return [
        Problem(where[0] + "".join(f", {w.rpartition(' ')[2]}" for w in where[1:]), what, fix)
        for (what, fix), where in places.items()
    ]


def _list_inventory(path: Path) -> dict[str, Any]:
    done = _ansible("ansible-inventory", "-i", str(path), "--list")
    unexpected = re.findall(r"Skipping (?:unexpected )?key \((.+?)\) in group \((.+?)\)", done.stderr)
    if unexpected:
        known, fix = ["hosts", "vars", "children"], "a group holds only `hosts`, `vars` and `children`"
        raise Refusal(
            Problem(f"{path}, group {group}", f"unknown key `{key}`{_did_you_mean(key, known)}", fix)
            for key, group in unexpected
        )
    if done.returncode != 0:
        raise Refusal([_syntax_problem(path, done.stderr)])
    return json.loads(done.stdout)


def _decrypt(where: str, variables: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """A host's variables with the vaulted ones decrypted, which ansible-inventory does not do.

    known: decrypted texts by their vaulted form; what is new comes in here, as several hosts may share it.
    Raises Refusal, naming the first variable that cannot be decrypted.
    """
    clear = dict(variables)
    for key, value in variables.items():
        if isinstance(value, dict) and "__ansible_vault" in value:
            text = value["__ansible_vault"]
            if text not in known:
                if not {"ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_VAULT_IDENTITY_LIST"} & set(os.environ):
                    # ansible-vault would ask at the terminal.
                    raise refuse(where, f"`{key}` is encrypted with Ansible Vault; there is no password", VAULT_FIX)
                done = _ansible("ansible-vault", "decrypt", "--output", "-", stdin=text)
                if done.returncode != 0:
                    raise refuse(where, f"`{key}` cannot be decrypted: {_last_line(done.stderr)}", VAULT_FIX)
                known[text] = done.stdout
            clear[key] = known[text]
    return clear


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("[ERROR]: ") if lines else "no reason given"


def _ansible(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = ansible_environment() | {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_VERBOSITY": "0"}  # what is printed, is read
    return subprocess.run(words, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def _syntax_problem(path: Path, stderr: str) -> Problem:
    """What Ansible prints about an inventory that it cannot read, as one problem."""
    where = str(path)
    origin = re.search(r"Origin: (/[^\n]+?):(\d+)(?::(\d+))?\n", stderr)
    if origin:
        where = f"{path if path.is_file() else origin[1]}, line {origin[2]}"
    yaml_error = re.search(r"YAML parsing failed: (.+)", stderr)
    if yaml_error:
        what = yaml_error[1].strip().rstrip(".")
        twice = re.search(r"duplicate mapping key '(.+?)'", what)
        if twice:
            return Problem(where, f"`{twice[1]}` stands here twice", "keep one of the two entries")
        return Problem(where, f"not valid YAML: {what}", "correct this line")
    shape = re.search(r"with 'yaml' plugin: (Invalid .+?)(?:, found \"<|\n\nFailed)", stderr, re.DOTALL)
    if shape:
        fix = "write every host as a key with its variables, such as `h1: {ansible_host: 10.0.0.1}`"
        return Problem(where, f"Ansible cannot read this inventory: {' '.join(shape[1].split())}", fix)
    reason = _last_line(stderr)
    fix = VAULT_FIX if "vault" in reason or "Decryption" in reason else "correct the file"
    return Problem(where, f"Ansible cannot read this inventory: {reason}", fix)


def _names_in_order(raw: dict[str, Any], group: str = "all") -> list[str]:
    """Host names in the order in which Ansible walks the inventory: groups from `all` down, hosts as written."""
    entry = raw.get(group, {})
    below = [name for child in entry.get("children", []) for name in _names_in_order(raw, child)]
    return list(dict.fromkeys([*entry.get("hosts", []), *below]))


def _misspelt_spares(path: str, raw: dict[str, Any], spares: set[str]) -> Iterator[Problem]:
    """Groups of hosts that are no spares, with a name that nearly is that of the group of spares. Pure."""
    for group in raw:
        is_like = difflib.get_close_matches(group.lower(), [SPARES], n=1, cutoff=0.85)
        if group != SPARES and is_like and not spares.issuperset(_names_in_order(raw, group)):
            what = f"the hosts of this group train like all others (did you mean `{SPARES}`?)"
            yield Problem(f"{path}, group {group}", what, f"call it `{SPARES}`, or give it a name that is less like it")


def _twice_in_ini(path: Path) -> Iterator[Problem]:
    """An INI inventory that lists a host twice in one section; Ansible itself merges the two without a word."""
    for file in source_files(path):
        if file.suffix in (".yml", ".yaml", ".json") or "_vars" in str(file.parent) or os.access(file, os.X_OK):
            continue
        section, seen = "", Counter[tuple[str, str]]()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            words = line.split("#")[0].split()
            if words and words[0].startswith("["):
                section = words[0]
            elif words and ":" not in section:
                seen[section, words[0]] += 1
                if seen[section, words[0]] == 2:
                    where, what = f"{file}, line {number}", f"host `{words[0]}` stands in this group twice"
                    yield Problem(where, what, "keep one of the two lines")


def _did_you_mean(word: str, known: list[str]) -> str:
    close = [name for name in known if len(word) > 2 and word in name] or difflib.get_close_matches(word, known, n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _misspelt(key: str) -> str | None:
    """The connection variable that a key nearly is; None for one of them, and for what is not like any of them."""
    if key in CONNECTION_VARIABLES:
        return None
    known = {name.removeprefix("ansible_"): name for name in sorted(CONNECTION_VARIABLES)}
    close = difflib.get_close_matches(key.removeprefix("ansible_"), known, n=1, cutoff=0.75)
    return known[close[0]] if close else None


def check_variables(path: str, host: str, variables: dict[str, Any]) -> list[Problem]:
    """Unknown and misspelt variables, and known ones with a bad value. Pure."""
    where, problems = f"{path}, host {host}", []
    for key, value in variables.items():
        if key.startswith("ansible_"):
            if meant := _misspelt(key):
                problems.append(Problem(where, f"unknown variable `{key}`", f"write `{meant}`, if that is meant"))
        elif key not in VARIABLES:
            what = f"unknown variable `{key}`{_did_you_mean(key, list(VARIABLES))}"
            fix = f"Muster knows {', '.join(VARIABLES)}, and Ansible's own `ansible_...`"
            problems.append(Problem(where, what, fix))
        elif not _good_value(key, value):
            what = f"`{key}: {value}` is not {VARIABLES[key]}"
            problems.append(Problem(where, what, f"give {VARIABLES[key]}"))
    return problems + (_not_without_root(where, variables) if _is_rootless(variables) else [])


def _is_rootless(variables: dict[str, Any]) -> bool:
    return _setting("rootless", variables.get("rootless")) is True


def _not_without_root(where: str, variables: dict[str, Any]) -> list[Problem]:
    """What does not go with `rootless: true`. Pure."""
    problems = []
    for setting, why, fix in (
        ("container_engine: docker", "with Docker, Muster needs root", "write `container_engine: podman` there"),
        ("firewall: true", "only root can close ports", "leave `firewall` out: a run's ports stay open there"),
        ("install_driver: true", "only root can install it", "leave `install_driver` out"),
        ("ansible_user: root", "root is nobody else there", "log in as a user, or leave `rootless` out"),
    ):
        key, value = setting.split(": ")
        if str(_setting(key, variables.get(key))).lower() == value:
            problems.append(Problem(where, f"`{setting}` and `rootless: true`: {why}", fix))
    return problems


def _good_value(key: str, value: Any) -> bool:
    def whole(number: Any, least: int) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number >= least

    if key == "nproc_per_node":
        return whole(value, 1)
    if key == "gpus":
        return isinstance(value, list) and all(whole(v, 0) for v in value) and len(set(value)) == len(value)
    if key == "train_network":
        try:
            ipaddress.ip_network(value)
        except ValueError:
            return False
        return "/" in str(value)
    if key == "train_interface":
        return isinstance(value, str) and bool(re.fullmatch(r"[^\s/]{1,15}", value))
    if key == "package_proxy":
        return isinstance(value, str) and bool(re.fullmatch(r"https?://[^\s/]+/?", value))
    if key in SWITCHES:
        return isinstance(_setting(key, value), bool)
    if key == "train_vpn":
        return value == "wireguard"
    if key == "container_engine":
        return value in ("auto", *engines.ENGINES)
    if key == "base_image":
        return isinstance(value, str) and (value.startswith("/") or bool(REFERENCE.fullmatch(value)))
    if key == "build_on":
        return isinstance(value, str) and bool(value)
    if key == "data_dir":
        return isinstance(value, str) and value.startswith("/")
    raise KeyError(key)  # a variable of VARIABLES that nobody checks


def check_distinct(path: str, targets: list[Target]) -> Iterator[Problem]:
    """Two names for one machine: the same address and port under two names. Pure."""
    first: dict[tuple[str, int], str] = {}
    for target in targets:
        place = (target.address, target.port)
        if place in first:
            what = f"`{first[place]}` and `{target.name}` are the same machine ({target.address})"
            yield Problem(path, what, "list each machine once; for more ranks use nproc_per_node")
        first.setdefault(place, target.name)


def _host(path: Path, name: str, variables: dict[str, Any]) -> Host:
    context = variables | {
        "inventory_dir": str((path if path.is_dir() else path.parent).resolve()),
        "inventory_hostname": name,
        "playbook_dir": str(ROOT / "playbooks"),
    }

    def get(*keys: str) -> str | None:
        for key in keys:
            if variables.get(key) is not None:
                return _render(key, variables[key], context)
        return None

    if get("ansible_connection") not in (None, "ssh", "smart", "ansible.builtin.ssh"):
        raise ValueError(f"`ansible_connection: {get('ansible_connection')}`: Muster reaches hosts over SSH only")
    if get("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"):
        raise ValueError("an SSH password is set: Muster logs in with keys (`ssh-copy-id` puts one on the host)")
    port = get("ansible_port", "ansible_ssh_port")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"`ansible_port: {port}` is not a port number")
    key_file = get("ansible_ssh_private_key_file", "ansible_private_key_file")
    address = get("ansible_host", "ansible_ssh_host") or name
    arguments = f"{get('ansible_ssh_common_args') or ''} {get('ansible_ssh_extra_args') or ''}"
    ssh = openssh_settings(address, port, get("ansible_user", "ansible_ssh_user"), arguments)
    rootless = _is_rootless(variables)
    target = Target(
        name=name,
        address=address,
        port=int(ssh["port"]),
        user=ssh["user"],
        key_file=str(Path(key_file).expanduser()) if key_file else None,
        jump=ssh.get("proxyjump"),
        proxy_command=ssh.get("proxycommand"),
        python=get("ansible_python_interpreter") or "python3",
        sudo_password=None if rootless else get("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
        rootless=rootless,
    )
    if target.key_file and not Path(target.key_file).is_file():
        raise ValueError(f"the key file {target.key_file} does not exist")
    return Host(target, {key: _setting(key, variables[key]) for key in VARIABLES if key in variables})


def _setting(key: str, value: Any) -> Any:
    """A variable of Muster's as it is meant: what stands for true or false becomes that."""
    return TRUTH.get(str(value).lower(), value) if key in SWITCHES else value


def _render(key: str, value: Any, context: dict[str, Any]) -> str:
    """A connection variable as text; `{{ ... }}` is filled from the host's other variables."""
    text = str(value)
    if "{{" not in text:
        return text
    import jinja2  # here, because most commands never need it and have to start fast

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    try:
        for _ in range(5):  # a variable may name another one
            text = environment.from_string(text).render(context)
    except jinja2.TemplateError as error:
        raise ValueError(f"`{key}: {value}` cannot be filled in: {error}") from None
    return text


def openssh_settings(address: str, port: str | None, user: str | None, arguments: str) -> dict[str, str]:
    """What OpenSSH itself would use for a host: port, user, proxyjump, proxycommand, from ~/.ssh/config too.

    So Ansible, rsync and Fabric, each with its own way of reading that file, use the same. Raises ValueError when ssh
    refuses `arguments`, which are the inventory's ansible_ssh_common_args and such.
    """
    words = ["ssh", *(["-p", port] if port else []), *(["-l", user] if user else []), *shlex.split(arguments)]
    try:
        done = subprocess.run(
            [*words, "-G", address], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        raise refuse("this machine", "OpenSSH's `ssh` is not installed", "`apt-get install openssh-client`") from None
    if done.returncode != 0:
        raise ValueError(f"ssh refuses `{shlex.join(words[1:])}` for {address}: {done.stderr.strip()}")
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
