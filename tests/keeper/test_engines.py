"""What container engines print, as Podman 4.3.1, Docker 20.10.24 and 26.1.5 printed it on hosts, and their words."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from keeper.engines import (
    ENGINES,
    NAMED_BY_ID,
    NOTE,
    ROOTLESS,
    ROOTS,
    Container,
    Docker,
    Podman,
    engine,
    noted,
    on_host,
    place,
)

ID, MANIFEST = "8ecbdab659ff" + "0" * 52, "2c59383456e4" + "1" * 52
TRAIN = "localhost/muster/train:latest"


def test_an_unknown_engine_is_podman_and_a_host_s_own_is_noted_there(tmp_path: Path) -> None:
    assert engine(None).name == engine("").name == "podman" and engine("docker").name == "docker"
    assert noted(str(tmp_path)).name == "podman"
    (tmp_path / NOTE[1:]).parent.mkdir(parents=True)
    (tmp_path / NOTE[1:]).write_text("docker\n")
    assert noted(str(tmp_path)).name == "docker"


def test_podmans_containers_are_read() -> None:
    labels = {"muster.run": "x", "muster.owner": "ann"}
    printed = [
        {"Names": ["muster-x-0"], "State": "exited", "Labels": labels, "Created": 1795280000, "Exited": True},
        {"Names": ["muster-y-0"], "State": "running", "Labels": None},
    ]
    assert Podman().read_containers(json.dumps(printed)) == [
        Container("muster-x-0", "exited", "x", "ann", 1795280000.0),
        Container("muster-y-0", "running", "", "", None),
    ]
    assert Podman().read_containers("null\n") == Podman().read_containers("") == []


def test_dockers_containers_are_read_whatever_an_owner_is_called() -> None:
    printed = "muster-r1-0\tpaused\tr1\tann@desk, lab\t2026-11-28 03:32:37 +0000 UTC\n"
    assert Docker().read_containers(printed) == [
        Container("muster-r1-0", "paused", "r1", "ann@desk, lab", 1795836757.0)
    ]
    assert Docker().read_containers("") == []
    assert Docker().read_containers("a\texited\tr1\tann\tyesterday\n")[0].created is None


def test_podmans_images_are_read() -> None:
    printed = [{"Id": f"sha256:{ID}", "Names": [TRAIN, "localhost/other:1"]}, {"Id": "c" * 64}]
    found = Podman().read_images(json.dumps(printed))
    assert found.names == {TRAIN: ID, "localhost/other:1": ID} and found.ids == {ID: 2, "c" * 64: 0}
    assert Podman().image(ID) == ID and Podman().all_names(ID, found) == [ID]


@pytest.mark.parametrize("own", [ID, MANIFEST])
def test_dockers_images_have_the_same_ids_whatever_its_image_store_calls_them(own: str) -> None:
    printed = f"{NAMED_BY_ID}{ID}\tsha256:{own}\n{TRAIN}\tsha256:{own}\nbusybox:<none>\tsha256:{'d' * 64}\n"
    found = Docker().read_images(printed)
    assert found.names == {TRAIN: ID} and found.ids == {ID: 1, "d" * 64: 0}
    assert Docker().image(ID) == NAMED_BY_ID + ID
    assert Docker().all_names(ID, found) == [TRAIN, NAMED_BY_ID + ID]


def test_an_image_that_lost_its_name_is_still_known_by_its_id() -> None:
    found = Docker().read_images(f"{NAMED_BY_ID}{ID}\tsha256:{MANIFEST}\n")
    assert found.ids == {ID: 0} and found.by_id == {ID}


def test_engines_say_what_they_are() -> None:
    podman = {"version": {"Version": "4.3.1"}, "store": {"graphDriverName": "overlay", "graphRoot": "/data"}}
    assert Podman().read_about(json.dumps(podman)) == ("4.3.1", "overlay", "/data", 1, None)
    docker = {"ServerVersion": "20.10.24+dfsg1", "Driver": "overlay2", "DockerRootDir": "/var/lib/docker"}
    older = {**docker, "DriverStatus": [["Backing Filesystem", "extfs"], ["Supports d_type", "true"]]}
    assert Docker().read_about(json.dumps(older)) == ("20.10.24+dfsg1", "overlay2", "/var/lib/docker", 1, None)
    newer = {**docker, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    assert Docker().read_about(json.dumps(newer)).copies == 2
    silent = {"ServerErrors": ["Cannot connect to the Docker daemon"], "ClientInfo": {}}  # with exit status 0
    with pytest.raises(ValueError, match="Cannot connect"):
        Docker().read_about(json.dumps(silent))
    assert Podman().read_version("podman version 4.3.1\n") == "4.3.1" and Docker().read_version("\n") == ""


@pytest.mark.parametrize(
    ("name", "configuration", "storage"),
    [
        (
            "podman",
            '[storage]\ndriver = "overlay"\n# graphroot = "/no"\n  graphroot = "/data/podman"\n',
            "/data/podman",
        ),
        ("docker", '{"log-level": "warn",\n "data-root": "/data/docker"}', "/data/docker"),
        ("podman", "", ""),
        ("docker", "{}", ""),
    ],
)
def test_the_folder_of_images_is_read_from_the_configuration(name: str, configuration: str, storage: str) -> None:
    assert engine(name).read_storage(configuration) == storage


def test_gpus_are_given_as_each_engine_takes_them() -> None:
    assert "nvidia.com/gpu=2" in Podman().run_words([0, 2]) and '"device=0,2"' in Docker().run_words([0, 2])
    for kind in ENGINES.values():
        assert kind().has_gpus(["run", *kind().run_words([0])]) and not kind().has_gpus(["run", *kind().run_words([])])


@pytest.mark.parametrize("name", [*ENGINES, "none"])
@pytest.mark.parametrize("there", ["image", "no image", "no answer"])
def test_a_shell_asks_the_engine_of_its_host(tmp_path: Path, name: str, there: str) -> None:
    """What a host prints, with an engine that is a script and with a note that stands elsewhere."""
    status = {"image": (0, 0), "no image": (0, 1), "no answer": (125, 125)}[there]
    for own in ENGINES:
        asked = f"case $1 in version) exit {status[0]};; esac; echo '{{}}'; exit {status[1]}"
        (tmp_path / own).write_text(f"#!/bin/sh\necho {own} >>{tmp_path}/asked\n{asked}\n")
        (tmp_path / own).chmod(0o755)
    (tmp_path / "note").write_text(f"{name}\n")
    command = on_host(lambda kind: kind.find_image(ID)).replace(NOTE, str(tmp_path / "note")) + "; echo goes on"
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["sh", "-c", command], env={"PATH": path}, capture_output=True, text=True, timeout=300)
    assert set((tmp_path / "asked").read_text().split()) == {name if name in ENGINES else "podman"}
    found = {"image": ["image=yes", "goes on"], "no image": ["goes on"], "no answer": []}[there]
    assert [line for line in done.stdout.splitlines() if line != "{}"] == found
    assert done.returncode == (1 if there == "no answer" else 0)


def test_without_root_it_is_the_users_own_podman_and_a_place_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever root has noted for its own runs."""
    (tmp_path / NOTE[1:]).parent.mkdir(parents=True)
    (tmp_path / NOTE[1:]).write_text("docker\n")
    assert place() == ROOTS
    monkeypatch.setenv(ROOTLESS, "yes")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1001")
    (tmp_path / "disk").mkdir()
    (tmp_path / "home/.local/share").mkdir(parents=True)
    (tmp_path / "home/.local/share/muster").symlink_to(tmp_path / "disk")
    assert noted(str(tmp_path)).name == "podman" and noted(str(tmp_path)).storage.startswith(f"{tmp_path}/home/")
    assert place() == (f"{tmp_path}/disk", "/run/user/1001/muster")
    command = on_host(lambda kind: f"echo {kind.name}").replace(NOTE, str(tmp_path / NOTE[1:]))
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout == "podman\n"
    host = {"security": {"rootless": True}, "cgroupControllers": None}
    podman = {"version": {"Version": "5"}, "store": {"graphDriverName": "vfs", "graphRoot": "/d"}, "host": host}
    assert Podman().read_about(json.dumps(podman)).controllers == []
