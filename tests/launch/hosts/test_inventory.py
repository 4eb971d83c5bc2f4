"""Promise: a bad inventory is refused before any host is touched, naming every bad thing, its place and its fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.cli.refusal import Refusal
from launch.hosts import inventory

asks_ansible = pytest.mark.slow  # each command of Ansible takes a second

GOOD = """\
all:
  vars: {ansible_user: muster}
  hosts:
    zeta: {ansible_host: 192.0.2.1}
    alpha: {ansible_host: 192.0.2.2, nproc_per_node: 2}
  children:
    gpu:
      hosts:
        beta: {ansible_host: 192.0.2.3, ansible_port: 2222, gpus: [0, 2]}
"""


@pytest.fixture
def without_ansible(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what Muster itself thinks of an inventory: reads plain YAML without ansible-inventory, to the same end."""

    def list_inventory(path: Path) -> dict[str, Any]:
        groups, hostvars = dict[str, Any](), dict[str, dict[str, Any]]()

        def add(name: str, group: dict[str, Any], inherited: dict[str, Any]) -> None:
            variables, children = inherited | group.get("vars", {}), group.get("children", {})
            hosts = {host: own or {} for host, own in group.get("hosts", {}).items()}
            groups[name] = {"hosts": list(hosts), "children": list(children)}
            for host, own in hosts.items():
                hostvars[host] = hostvars.get(host, {}) | variables | own
            for child, content in children.items():
                add(child, content, variables)

        add("all", yaml.safe_load(path.read_text())["all"], {})
        return groups | {"_meta": {"hostvars": hostvars}}

    monkeypatch.setattr(inventory, "_list_inventory", list_inventory)


def read(folder: Path, text: str, name: str = "hosts.yml") -> inventory.Inventory:
    path = folder / name
    path.write_text(text)
    return inventory.read(path)


def refusal(folder: Path, text: str, name: str = "hosts.yml") -> str:
    with pytest.raises(Refusal) as caught:
        read(folder, text, name)
    assert all(problem.where and problem.what and problem.fix for problem in caught.value.problems)
    return str(caught.value)


def test_hosts_come_in_inventory_order_with_their_settings(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = read(tmp_path, GOOD)
    assert [host.name for host in found.hosts] == ["zeta", "alpha", "beta"]
    assert [host.settings for host in found.hosts] == [{}, {"nproc_per_node": 2}, {"gpus": [0, 2]}]
    assert found.build_on == ""
    beta = found.hosts[2].target
    assert (beta.address, beta.port, beta.user) == ("192.0.2.3", 2222, "muster")
    request.getfixturevalue("without_ansible")
    assert read(tmp_path, GOOD) == found


@asks_ansible
def test_an_ini_inventory_reads_as_well(tmp_path: Path) -> None:
    """Also what is true or false there, and spares in a group of that group, whatever its name."""
    text = (
        "[all]\nh2 ansible_host=192.0.2.2 airgap=true firewall=no\nh1 ansible_host=192.0.2.1 nproc_per_node=3\n"
        "[spare]\nh3 ansible_host=192.0.2.3\n[spares:children]\nspare\n"
    )
    found = [(host.name, host.settings, host.spare) for host in read(tmp_path, text, "hosts.ini").hosts]
    assert found == [
        ("h2", {"airgap": True, "firewall": False}, False), ("h1", {"nproc_per_node": 3}, False), ("h3", {}, True)
    ]  # fmt: skip


@asks_ansible
def test_a_variable_may_be_made_from_others(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    found = read(
        tmp_path,
        "all:\n  hosts:\n    a:\n      ansible_host: 192.0.2.1\n"
        '      ansible_ssh_private_key_file: "{{ inventory_dir }}/key"\n',
    )
    assert found.hosts[0].target.key_file == str(tmp_path / "key")


@asks_ansible
def test_yaml_error_names_file_and_line(tmp_path: Path) -> None:
    said = refusal(tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1\n    b: [\n")
    assert "hosts.yml, line" in said and "YAML" in said


@asks_ansible
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all:\n  hosts:\n    - 192.0.2.1\n", 'Invalid "hosts" entry for "all" group, requires a dictionary\n'),
        ("all:\n  hosts:\n    a: 192.0.2.1\n", "expected dictionary and got: 192.0.2.1\n"),
    ],
)
def test_a_host_that_is_no_key_with_variables(tmp_path: Path, text: str, said: str) -> None:
    found = refusal(tmp_path, text)
    assert said in found and "such as `h1: {ansible_host: 10.0.0.1}`" in found


@asks_ansible
def test_host_twice(tmp_path: Path) -> None:
    said = refusal(tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1}\n    a: {ansible_host: 192.0.2.2}\n")
    assert "line 4" in said and "`a` stands here twice" in said


@pytest.mark.usefixtures("without_ansible")
def test_two_names_for_one_machine(tmp_path: Path) -> None:
    said = refusal(tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1}\n    b: {ansible_host: 192.0.2.1}\n")
    assert "`a` and `b` are the same machine (192.0.2.1)" in said


@asks_ansible
@pytest.mark.parametrize("text", ["all: {hosts: {}}\n", "all:\n  hosts:\n"])
def test_no_host(tmp_path: Path, text: str) -> None:
    assert "holds no host" in refusal(tmp_path, text)


@pytest.mark.usefixtures("without_ansible")
def test_the_group_spares_names_hosts_that_wait(tmp_path: Path) -> None:
    hosts = "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1}\n    b: {ansible_host: 192.0.2.2}\n"
    group = "  children:\n    spares:\n      hosts:\n"
    found = read(tmp_path, hosts + group + "        b:\n        c: {ansible_host: 192.0.2.3}\n").hosts
    assert [(host.name, host.spare) for host in found] == [("a", False), ("b", True), ("c", True)]
    assert "all hosts are in the group `spares`" in refusal(tmp_path, hosts + group + "        a:\n        b:\n")


@asks_ansible
def test_a_host_twice_in_ini_and_a_group_that_is_nearly_called_spares_are_refused(tmp_path: Path) -> None:
    hosts = "[all]\na ansible_host=192.0.2.1\na ansible_host=192.0.2.2\n[spare]\nb ansible_host=192.0.2.3\n"
    said = refusal(tmp_path, hosts, "hosts.ini")
    assert "line 3" in said and "host `a` stands in this group twice" in said
    assert "group spare: " in said and "did you mean `spares`?" in said


@pytest.mark.parametrize(
    ("value", "meant"),
    [("true", True), ("True", True), ("YES", True), ("on", True), ("1", True), ("no", False), ("False", False)],
)
def test_words_of_an_ini_file_are_true_or_false(value: str, meant: bool) -> None:
    assert inventory.check_variables("hosts.ini", "a", {"airgap": value, "install_driver": value}) == []
    assert (
        inventory._setting("airgap", value) is inventory._setting("install_driver", value) is meant
        and inventory._setting("data_dir", value) == value
    )


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no such inventory"):
        inventory.read(tmp_path / "absent.yml")


@asks_ansible
def test_unknown_key_of_a_group(tmp_path: Path) -> None:
    said = refusal(tmp_path, "all:\n  hots:\n    a: {ansible_host: 192.0.2.1}\n")
    assert "unknown key `hots`" in said and "did you mean `hosts`" in said


@pytest.mark.usefixtures("without_ansible")
def test_unknown_variables_are_all_named_with_a_guess(tmp_path: Path) -> None:
    said = refusal(
        tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1, nproc: 2}\n    b: {gpu: [0], colour: red}\n"
    )
    assert "host a: unknown variable `nproc`" in said and "did you mean `nproc_per_node`" in said
    assert "unknown variable `gpu` (did you mean `gpus`?)" in said and "unknown variable `colour`" in said


@pytest.mark.usefixtures("without_ansible")
def test_one_problem_on_many_hosts_is_said_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, "all:\n  vars: {colour: red}\n  hosts:\n    a: {ansible_host: 192.0.2.1}\n    b: {}\n")
    assert said.count("unknown variable `colour`") == 1 and "host a, b" in said


@pytest.mark.parametrize(
    "base", ["/srv/images/torch.tar", "ghcr.io:443/team/torch:2.13-cuda", "me/it@sha256:" + 64 * "a"]
)
def test_a_base_image_is_an_archive_or_of_a_registry(base: str) -> None:
    assert inventory.check_variables("hosts.yml", "a", {"base_image": base}) == []


@pytest.mark.usefixtures("without_ansible")
def test_a_base_image_is_one_for_all_hosts(tmp_path: Path) -> None:
    path, base = tmp_path / "hosts.yml", "ghcr.io:443/team/torch:2.13-cuda"
    path.write_text(
        f"all:\n  vars: {{base_image: '{base}'}}\n  hosts:\n    a: {{ansible_host: 192.0.2.1}}\n    b: {{}}\n"
    )
    assert inventory.read(path).base_image == base
    said = refusal(tmp_path, f"all:\n  hosts:\n    a: {{ansible_host: 192.0.2.1, base_image: '{base}'}}\n    b: {{}}\n")
    assert f"hosts differ in `base_image`: none, {base}" in said


@pytest.mark.usefixtures("without_ansible")
def test_images_are_built_here_or_on_one_host_of_the_inventory(tmp_path: Path) -> None:
    hosts = "hosts:\n    a: {ansible_host: 192.0.2.1}\n    b: {ansible_host: 192.0.2.2}\n"
    path = tmp_path / "hosts.yml"
    for setting, builder in {"{build_on: b}": "b", "{build_on: control}": ""}.items():
        path.write_text(f"all:\n  vars: {setting}\n  {hosts}")
        assert inventory.read(path).build_on == builder
    said = refusal(tmp_path, f"all:\n  vars: {{build_on: bb}}\n  {hosts}")
    assert "`build_on: bb` names no host of this inventory" in said and "name one of a, b, or `control`" in said
    said = refusal(tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1, build_on: a}\n    b: {}\n")
    assert "hosts differ in `build_on`: none, a" in said


@pytest.mark.usefixtures("without_ansible")
def test_a_vpn_is_for_all_hosts_or_none(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("all:\n  vars: {train_vpn: wireguard}\n  hosts:\n    a: {ansible_host: 192.0.2.1}\n    b: {}\n")
    assert inventory.read(path).train_vpn == "wireguard"
    said = refusal(tmp_path, "all:\n  hosts:\n    a: {ansible_host: 192.0.2.1, train_vpn: wireguard}\n    b: {}\n")
    assert "hosts differ in `train_vpn`: none, wireguard" in said and "both ends need it" in said
    hosts = "a: {ansible_host: 192.0.2.1}\n    b: {rootless: true}\n"
    said = refusal(tmp_path, f"all:\n  vars: {{train_vpn: wireguard}}\n  hosts:\n    {hosts}")
    assert "`rootless: true` on b: a VPN needs root" in said


BAD_VALUES = (
    "build_on: 7",
    "nproc_per_node: 0",
    "nproc_per_node: two",
    "gpus: 0",
    "gpus: [0, 0]",
    "gpus: [-1]",
    "train_network: 10.0.0.1",
    "train_network: 10.0.0.1/8",
    "train_interface: 'a b'",
    "train_vpn: true",
    "data_dir: relative/path",
    "firewall: sometimes",
    "rootless: sometimes",
    "base_image: relative/Archive.tar",
    "base_image: 7",
    "ansible_port: 99999",
    "ansible_connection: local",
    "ansible_password: secret",
    "ansible_ssh_common_args: --no-such-option",
    "ansible_ssh_private_key_file: /does/not/exist",
)


@asks_ansible
def test_bad_values_are_all_named(tmp_path: Path) -> None:
    hosts = "".join(
        f"    bad{number}:\n      ansible_host: 192.0.2.{number}\n      {setting}\n"
        for number, setting in enumerate(BAD_VALUES)
    )
    said = refusal(tmp_path, f"all:\n  hosts:\n{hosts}")
    assert [setting for number, setting in enumerate(BAD_VALUES) if f"host bad{number}: " not in said] == []


@pytest.mark.usefixtures("without_ansible")
def test_what_does_not_go_without_root_is_refused(tmp_path: Path) -> None:
    settings = "{rootless: true, container_engine: docker, firewall: true, ansible_user: root}"
    said = refusal(tmp_path, f"all:\n  vars: {settings}\n  hosts:\n    a: {{ansible_host: 192.0.2.1}}\n")
    assert all(
        one in said for one in ("`container_engine: docker` and", "`firewall: true` and", "`ansible_user: root`")
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ansible_hots", "ansible_host"),
        ("ansible_usr", "ansible_user"),
        ("ansible_prot", "ansible_port"),
        ("ansible_become_passwrd", "ansible_become_password"),
        ("ansible_ssh_comon_args", "ansible_ssh_common_args"),
        ("ansible_host", None),
        ("ansible_hostname", None),  # facts, which Ansible knows and Muster need not
        ("ansible_user_id", None),
        ("ansible_distribution", None),
        ("ansible_winrm_transport", None),
    ],
)
def test_a_misspelt_connection_variable_is_refused_with_the_right_name(key: str, meant: str | None) -> None:
    problems = inventory.check_variables("hosts.yml", "a", {key: "x"})
    assert [problem.fix for problem in problems] == ([f"write `{meant}`, if that is meant"] if meant else [])


@pytest.mark.slow  # ansible-doc takes seconds
@pytest.mark.long  # another version of Ansible alone can change it
def test_every_connection_variable_of_ansible_is_known() -> None:
    found = set()
    for kind, name in (("connection", "ssh"), ("become", "sudo")):
        words = [str(Path(sys.executable).with_name("ansible-doc")), "--json", "-t", kind, name]
        said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=300).stdout
        options = json.loads(said)[name]["doc"]["options"].values()
        found |= {variable["name"] for option in options for variable in option.get("vars", [])}
    assert {name for name in found if name.startswith("ansible_")} <= inventory.CONNECTION_VARIABLES


#: `ansible_user: somebody`, by ansible-vault with the password below.
VAULTED = """\
$ANSIBLE_VAULT;1.1;AES256
38376331383930666139343438313637656363326433636333313739646337376664613933306262
3533376637346562653336376435373736373764303839320a323435326463333630626137663563
63323637633236653330353733313464663038666531306638376339643063656536393435366332
3937643462613632650a376364623630656138396234633166376337646331623431343438386537
36376363393964373034316338333933613933663665616362393165373462623763
"""


def name_password(folder: Path, monkeypatch: pytest.MonkeyPatch, password: str = "of the vault") -> None:
    """As a user would name it."""
    (folder / "password").write_text(password)
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(folder / "password"))


@asks_ansible
def test_vaulted_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "    ansible_become_password: !vault |\n" + "".join(f"      {line}\n" for line in VAULTED.splitlines())
    text = f"all:\n  vars:\n{secret}  hosts:\n    a: {{ansible_host: 192.0.2.1}}\n    b: {{ansible_host: 192.0.2.2}}\n"
    name_password(tmp_path, monkeypatch)
    assert [host.target.sudo_password for host in read(tmp_path, text).hosts] == ["ansible_user: somebody\n"] * 2
    name_password(tmp_path, monkeypatch, "of another vault")
    assert "`ansible_become_password` cannot be decrypted: Decryption failed" in refusal(tmp_path, text)
    monkeypatch.delenv("ANSIBLE_VAULT_PASSWORD_FILE")
    said = refusal(tmp_path, text)
    assert "host a, b: `ansible_become_password` is encrypted" in said and "ANSIBLE_VAULT_PASSWORD_FILE" in said


@asks_ansible
def test_a_vaulted_file_of_variables_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text(VAULTED)
    text = "all: {hosts: {a: {ansible_host: 192.0.2.1}}}\n"
    name_password(tmp_path, monkeypatch)
    assert read(tmp_path, text).hosts[0].target.user == "somebody"
    monkeypatch.delenv("ANSIBLE_VAULT_PASSWORD_FILE")
    assert "ANSIBLE_VAULT_PASSWORD_FILE" in refusal(tmp_path, text)


def test_the_digest_changes_with_every_file_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(GOOD)
    digests = {inventory.digest(path)}
    (tmp_path / "known_hosts").write_text("not part of it")
    digests.add(inventory.digest(path))
    assert len(digests) == 1
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("nproc_per_node: 2\n")
    digests.add(inventory.digest(path))
    path.write_text(GOOD + "\n")
    digests.add(inventory.digest(path))
    assert len(digests) == 3


@asks_ansible
def test_the_sample_inventory_is_valid() -> None:
    assert [host.name for host in inventory.read(Path("inventory/hosts.yml")).hosts] == ["node1", "node2"]


def test_build_names_keep_inventories_apart(tmp_path: Path) -> None:
    assert inventory.build_name(Path("inventory/lab")) == "lab"
    assert inventory.build_name(Path("inventory/hosts.yml")) == "hosts"
    assert inventory.build_name(tmp_path / "a" / "hosts.yml") != inventory.build_name(tmp_path / "b" / "hosts.yml")
