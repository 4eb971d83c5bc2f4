"""Promises: a run's container may do nothing on its host that it need not, and leaves some of it to the rest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from containers import image
from keeper import USER_ID
from launch.job.container import LIMITS, start_words
from tests.launch.samples import cluster

GIB = 1 << 30


def words(**facts: object) -> list[str]:
    host = replace(cluster(2).hosts[0], facts=facts)
    return start_words(host, "muster-run-0", {"muster.run": "run"}, ["/a:/b:ro"], {"NAME": "value"}, 30)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_it_has_no_rights() -> None:
    command = words()
    assert value(command, "--cap-drop") == "all" and value(command, "--security-opt") == "no-new-privileges"
    assert value(command, "--user") == f"{USER_ID}:{USER_ID}" and "--read-only" in command
    assert not {"--privileged", "--ipc", "--pid", "--cap-add"} & set(command)


@pytest.mark.parametrize(
    ("memory", "left"),
    [(GIB // 2, GIB // 8), (2 * GIB, GIB // 4), (20 * GIB, GIB), (64 * GIB, 64 * GIB / 20), (1024 * GIB, 4 * GIB)],
)
def test_it_leaves_memory_to_the_host(memory: int, left: float) -> None:
    command = words(memory_bytes=memory)
    assert memory - int(value(command, "--memory").removesuffix("b")) == int(left)
    assert value(command, "--shm-size") == f"{memory // 2}b"


def test_it_leaves_threads_to_the_host() -> None:
    assert value(words(threads_max=65536), "--pids-limit") == "32768"


def test_what_is_not_known_is_not_limited() -> None:
    assert not set(LIMITS) & set(words())


def test_the_image_knows_the_user() -> None:
    train, workload = ((image.ROOM / name / "Containerfile").read_text() for name in ("train", "workload"))
    assert f"'muster:x:{USER_ID}:{USER_ID}::" in train and f"'muster:x:{USER_ID}:'" in train
    assert f"COPY --chown={USER_ID}:{USER_ID} . " in workload


def test_gpus_get_the_rdma_devices_that_work() -> None:
    def port(name: str, verbs: str | None, **more: object) -> dict[str, object]:
        return {"device": name, "port": 1, "state": "ACTIVE", "soft": False, "verbs": verbs, **more}

    ports = [
        *(port("mlx5_1", "uverbs1"), port("mlx5_0", "uverbs0"), port("mlx5_2", "uverbs2", state="DOWN")),
        *(port("rxe0", "uverbs3", soft=True), port("mlx5_3", None)),
    ]
    host = replace(cluster(1, gpus=True).hosts[0], facts={"rdma": ports})
    command = start_words(host, "muster-run-0", {}, [], {}, 30)
    given = [word for option, word in pairwise(command) if option == "--device" and "infiniband" in word]
    assert given == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    assert value(command, "--ulimit") == "memlock=-1:-1"
    assert "--ulimit" not in start_words(replace(host, gpus=[]), "muster-run-0", {}, [], {}, 30)


def test_a_users_own_podman_limits_what_it_was_given_to_limit() -> None:
    facts = {"memory_bytes": 4 * GIB, "threads_max": 1000}
    some = words(engine={"name": "podman", "controllers": ["cpu", "pids"]}, **facts)
    assert value(some, "--pids-limit") == "500" and "--memory" not in some and "--shm-size" in some
    none = words(engine={"name": "podman", "controllers": []}, **facts)
    assert not {"--memory", "--pids-limit"} & set(none)
    roots = words(engine={"name": "podman", "controllers": None}, **facts)
    assert {"--memory", "--pids-limit"} <= set(roots)
