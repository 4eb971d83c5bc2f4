"""Promise: the plan is a pure function; ranks are numbered in inventory order; every host gets its own interface."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keeper import SCRATCH_DIR
from keeper.placement import Place, placed
from launch.cli.refusal import Refusal
from launch.hosts.clustermap import VPN_INTERFACE, ClusterMap
from launch.job import plan as plans
from launch.job.plan import Options, Plan, Ports
from launch.local import environment
from tests.launch.fake_hosts import ports
from tests.launch.samples import cluster


def make(nprocs: list[int], options: Options = Options(), gpus: bool = False) -> Plan:  # noqa: B008
    free = Ports(29512, 29513, tuple(29400 + number for number in range(len(nprocs))))
    return plans.make_plan(cluster(*nprocs, gpus=gpus), options, "20260101-000000-abcd", free, "me@here", "now")


def places(plan: Plan, *hosts: str) -> list[Place]:
    """Of the first attempt; or of a later one, on these hosts."""
    document = json.loads(json.dumps(plans.document(plan)))
    return placed(document, hosts or [one.host for one in plan.hosts], plan.master_port, plan.free_port)


def agent(plan: Plan, node_rank: int = 0) -> list[str]:
    return places(plan)[node_rank].agent


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_ranks_are_counted_up_host_by_host(nprocs: list[int]) -> None:
    plan = make(nprocs)
    assert [rank for host_plan in plan.hosts for rank in host_plan.ranks] == list(range(sum(nprocs)))
    assert [len(host_plan.ranks) for host_plan in plan.hosts] == nprocs
    assert [place.ranks for place in places(plan)] == [host_plan.ranks for host_plan in plan.hosts]
    assert plan.world_size == sum(nprocs)
    assert plan.master_addr == plan.hosts[0].address and plan.master_host == "h1"


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_hosts_differ_only_in_what_is_their_own(nprocs: list[int]) -> None:
    commands = [place.agent for place in places(make(nprocs))]
    addresses = {c[c.index("--master-addr") + 1] for c in commands}
    ports = {c[c.index("--master-port") + 1] for c in commands}
    assert addresses == {"10.78.0.11"} and ports == {"29512"}
    assert [c[c.index("--node-rank") + 1] for c in commands] == [str(i) for i in range(len(nprocs))]
    assert [c[c.index("--nproc-per-node") + 1] for c in commands] == [str(n) for n in nprocs]


def test_another_attempt_is_placed_on_its_own_hosts_from_the_same_plan() -> None:
    second, third = placed(plans.document(make([1, 2, 3])), ["h2", "h3"], 29544, 29545, attempt=2)
    assert (second.ranks, third.ranks) == ([0, 1], [2, 3, 4])
    words = shlex.join(third.agent)
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 3 --master-addr 10.78.0.12 --master-port 29544" in words
    assert third.environment == {"MUSTER_ATTEMPT": "2", "MUSTER_FREE_PORT": "29545"}


def test_interfaces_are_each_hosts_own_and_nccl_takes_the_exact_name() -> None:
    for index, host_plan in enumerate(make([1, 2]).hosts):
        assert host_plan.environment["GLOO_SOCKET_IFNAME"] == f"eno{index}"
        assert host_plan.environment["NCCL_SOCKET_IFNAME"] == f"=eno{index}"


def port(
    device: str,
    layer: str,
    state: str = "ACTIVE",
    nics: Sequence[str] = (),
    soft: bool = False,
    verbs: str | None = "uverbs0",
) -> dict[str, Any]:
    known = {"device": device, "port": 1, "state": state, "link_layer": layer, "verbs": verbs}
    return {**known, "nics": list(nics), "soft": soft}


def test_a_plan_without_torchrun_needs_one_rank_on_every_host() -> None:
    options = Options(module="train.forecast.probe", direct=True, args=("--seconds", "1"))
    last = agent(make([1, 1], options), 1)
    wanted = ["--direct", "1", "2", "10.78.0.11", "29512", "train.forecast.probe", "--seconds", "1"]
    assert last[-len(wanted) :] == wanted
    assert "--direct" not in agent(make([1, 2], options))


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([], [], [{}, {}]),
        (
            [port("mlx5_0", "InfiniBand"), port("mlx5_1", "InfiniBand", "DOWN")],
            [port("mlx5_2", "InfiniBand")],
            [{"NCCL_IB_HCA": "=mlx5_0:1"}, {"NCCL_IB_HCA": "=mlx5_2:1"}],
        ),
        (
            [port("mlx5_0", "Ethernet", nics=["eno0"]), port("mlx5_1", "Ethernet", nics=["mgmt"])],
            [port("mlx5_0", "Ethernet", nics=["eno1"])],
            [{"NCCL_IB_HCA": "=mlx5_0:1"}, {"NCCL_IB_HCA": "=mlx5_0:1"}],
        ),
        ([port("mlx5_0", "InfiniBand")], [], [{"NCCL_IB_DISABLE": "1"}] * 2),
        ([port("mlx5_0", "InfiniBand")], [port("mlx5_0", "InfiniBand", "INIT")], [{"NCCL_IB_DISABLE": "1"}] * 2),
        ([port("mlx5_0", "InfiniBand")], [port("mlx5_0", "Ethernet", nics=["eno1"])], [{"NCCL_IB_DISABLE": "1"}] * 2),
        ([port("rxe0", "Ethernet", nics=["eno0"], soft=True)] * 1, [], [{"NCCL_IB_DISABLE": "1"}] * 2),
        ([port("mlx5_0", "InfiniBand")], [port("mlx5_0", "InfiniBand", verbs=None)], [{"NCCL_IB_DISABLE": "1"}] * 2),
    ],
)
def test_rdma_is_used_where_every_host_has_an_active_port_of_one_kind(
    first: list[dict[str, Any]], second: list[dict[str, Any]], wanted: list[dict[str, str]]
) -> None:
    known = cluster(1, 1)
    hosts = [
        replace(host, facts={**host.facts, "rdma": ports})
        for host, ports in zip(known.hosts, (first, second), strict=True)
    ]
    made = plans.make_plan(replace(known, hosts=hosts), Options(), "run-1", ports(2), "me@here", "now")
    for place, variables in zip(places(made), wanted, strict=True):
        assert {key: value for key, value in place.environment.items() if key.startswith("NCCL_IB")} == variables
    assert not any(key.startswith("NCCL_IB") for place in places(made, "h1") for key in place.environment)


def test_rdma_is_off_where_training_goes_through_a_vpn() -> None:
    known = cluster(1, 1)
    rdma = {"rdma": [port("mlx5_0", "InfiniBand")]}
    hosts = [replace(host, facts=host.facts | rdma, interface=VPN_INTERFACE) for host in known.hosts]
    made = plans.make_plan(replace(known, hosts=hosts), Options(), "run-1", ports(2), "me@here", "now")
    for place in places(made):
        own = {key: value for key, value in place.environment.items() if key.startswith("NCCL_IB")}
        assert own == {"NCCL_IB_DISABLE": "1"}


def test_cores_are_shared_among_the_ranks_of_a_host() -> None:
    assert [host_plan.environment["OMP_NUM_THREADS"] for host_plan in make([1, 2, 8]).hosts] == ["4", "2", "1"]


@pytest.mark.slow  # it imports torch
def test_ranks_get_memory_in_huge_pages_however_they_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.start.memory import HUGE_PAGES
    from train.start.spawn import shared_variables

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    of_hosts = [host_plan.environment for host_plan in make([1, 2]).hosts]
    each = [*of_hosts, environment(1, tmp_path, 30), shared_variables(2, 29400)]
    assert {variables["GLIBC_TUNABLES"] for variables in each} == {HUGE_PAGES}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2")
    assert environment(1, tmp_path, 30)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=2"
    assert "GLIBC_TUNABLES" not in shared_variables(2, 29400)  # the user's stays


def test_a_host_may_call_the_others_from_any_address_of_its_nics() -> None:
    def nic(*addresses: str, **more: object) -> dict[str, object]:
        scopes = {True: "link", False: "global"}
        listed = [{"address": one, "scope": scopes[one.startswith("fe80")]} for one in addresses]
        return {"up": True, "refused": None, "addresses": listed, **more}

    known = cluster(1, 1)
    nics = [
        nic("10.78.0.11", "10.78.0.99", "fe80::1"),
        nic("172.17.0.1", refused="a bridge"),
        nic("10.9.0.1", up=False),
    ]
    known.hosts[0].facts["nics"] = nics
    known.hosts[1] = replace(known.hosts[1], firewall=False)
    free = Ports(29512, 29513, (29400, 29401))
    first, second = plans.make_plan(known, Options(), "run", free, "me", "now").hosts
    assert (first.addresses, first.firewall) == (["10.78.0.11", "10.78.0.99"], True)
    assert (second.addresses, second.firewall) == (["10.78.0.12"], False)


def test_gpus_and_data_reach_the_container() -> None:
    first, second = make([2, 2], gpus=True).hosts
    assert "nvidia.com/gpu=0" in first.command and "nvidia.com/gpu=1" in first.command
    assert "/srv/data:/data:ro" in first.command and "/srv/data:/data:ro" not in second.command


def test_a_users_script_takes_the_trainers_place_and_its_arguments_stay_apart() -> None:
    plan = make([1], Options(script="main.py", args=("--name", "two words"), image="ef" * 32))
    first = plan.hosts[0]
    assert agent(plan)[-4:] == ["--", "main.py", "--name", "two words"] and "ef" * 32 in first.command
    assert agent(plan)[4] == "--fill" and "--fill" not in agent(make([1]))
    assert shlex.split(shlex.join(agent(plan))) == agent(plan)


def test_a_script_works_in_a_folder_of_the_host() -> None:
    mount = "/var/lib/muster/runs/20260101-000000-abcd/workload:/workload"
    assert mount in make([1], Options(script="main.py")).hosts[0].command and mount not in make([1]).hosts[0].command


def test_a_plan_can_run_another_module_than_the_trainer() -> None:
    assert agent(make([1]))[-3:] == ["-m", "--", "train"]
    assert agent(make([1], Options(module="train.forecast.probe", args=("--seconds", "3"))))[-5:] == [
        *("-m", "--", "train.forecast.probe", "--seconds", "3")
    ]


@pytest.mark.parametrize(("nodes", "count"), [(None, 3), (1, 1), (3, 3)])
def test_nodes_takes_the_first_hosts(nodes: int | None, count: int) -> None:
    assert [h.name for h in plans.chosen_hosts(cluster(1, 1, 1), nodes)] == ["h1", "h2", "h3"][:count]


@pytest.mark.parametrize("nodes", ["0", "-1", "5", "two", "1.5"])
def test_bad_nodes_are_refused(nodes: str) -> None:
    with pytest.raises(Refusal) as caught:
        plans.chosen_hosts(cluster(1, 1, 1), plans.parse_nodes(nodes))
    assert nodes in str(caught.value) and "fix: give" in str(caught.value)


def with_spare(*nprocs: int) -> ClusterMap:
    """A cluster whose last host is a spare."""
    known = cluster(*nprocs)
    return replace(known, hosts=[*known.hosts[:-1], replace(known.hosts[-1], spare=True)])


def test_spares_come_after_all_others_and_have_no_ranks_yet() -> None:
    known = with_spare(1, 2, 4)
    with pytest.raises(Refusal, match=r"NODES=3.* has 2 hosts: h1, h2"):
        plans.chosen_hosts(known, 3)
    made = plans.make_plan(known, Options(max_restarts=3), RUN, ports(3), "me@here", "now")
    assert [one.ranks for one in made.hosts] == [[0], [1, 2], []] and made.world_size == 3
    assert "h3 (node rank 2, a spare, eno2 10.78.0.13)" in plans.describe(made)
    assert [place.ranks for place in places(made, "h2", "h3")] == [[0, 1], [2, 3, 4, 5]]
    assert plans.received(json.loads(json.dumps(plans.document(made))), RUN) == made
    without = plans.make_plan(known, Options(max_restarts=0), RUN, ports(3), "me@here", "now")
    assert [one.host for one in without.hosts] == ["h1", "h2"]


def test_how_often_a_run_may_go_on_is_a_number_and_a_script_has_to_say_that_it_can() -> None:
    assert (plans.parse_max_restarts("", False), plans.parse_max_restarts("", True)) == (3, -3)
    assert plans.parse_max_restarts("0", True) == 0 and plans.parse_max_restarts("7", True) == 7
    assert plans.parse_min_nodes("", 3) == 1 and plans.parse_min_nodes("3", 3) == 3
    assert plans.parse_max_host_failures("") == 2
    for bad in ("-1", "x", "1.5", "10001"):
        with pytest.raises(Refusal, match=f"MAX_RESTARTS={bad} is not a whole number from 0 to 10000"):
            plans.parse_max_restarts(bad, False)
    for bad in ("0", "4"):
        with pytest.raises(Refusal, match=f"MIN_NODES={bad} is not a whole number from 1 to 3"):
            plans.parse_min_nodes(bad, 3)


def test_a_dry_run_shows_every_command_in_full() -> None:
    plan = make([1, 2])
    shown = plans.describe(plan)
    for host_plan in plan.hosts:
        assert shlex.join(host_plan.command) in shown and shlex.join(places(plan)[host_plan.node_rank].agent) in shown
        assert all(f"{key}={value}" in shown for key, value in host_plan.environment.items())


def test_every_host_gets_the_plans_hash_and_the_image() -> None:
    plan = make([1, 2])
    for host_plan in plan.hosts:
        assert (
            host_plan.environment["MUSTER_PLAN_SHA256"] == plan.sha256
            and host_plan.environment["MUSTER_IMAGE"] == plan.image
        )
        assert (
            f"MUSTER_PLAN_SHA256={plan.sha256}" in host_plan.command
            and f"MUSTER_IMAGE={plan.image}" in host_plan.command
        )


def test_the_hash_is_that_of_the_plan_without_it() -> None:
    plan = make([1, 2])
    assert plan.sha256 == plans.digest(plan) == make([1, 2]).sha256 and len(plan.sha256) == 64


@pytest.mark.parametrize("other", [Options(args=("--lr", "1")), Options(image="ef" * 32), Options(grace=31)])
def test_another_plan_has_another_hash(other: Options) -> None:
    assert make([1, 2], other).sha256 != make([1, 2]).sha256 != make([2, 1]).sha256


def test_a_continued_run_sees_the_earlier_folder_read_only() -> None:
    plan = make([1, 2], Options(resume="20251231-000000-ffff"))
    for host_plan in plan.hosts:
        assert "/var/lib/muster/runs/20251231-000000-ffff:/muster/resume:ro" in host_plan.command
        assert host_plan.environment["MUSTER_RESUME_DIR"] == "/muster/resume"
    assert plan.resume == "20251231-000000-ffff"
    fresh = make([1]).hosts[0]
    assert "MUSTER_RESUME_DIR" not in fresh.environment and "resume" not in " ".join(fresh.command)


def test_the_container_outlives_the_grace_of_its_ranks() -> None:
    host_plan = make([1], Options(grace=60)).hosts[0]
    assert int(host_plan.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60  # the keeper kills first, and says so
    assert int(host_plan.command[host_plan.command.index("--stop-timeout") + 1]) > 60


@pytest.mark.parametrize("grace", ["0", "-1", "1.5", "soon", "9999", "²"])
def test_a_bad_grace_is_refused(grace: str) -> None:
    with pytest.raises(Refusal, match="GRACE="):
        plans.parse_grace(grace)
    assert (plans.parse_grace(""), plans.parse_grace("60")) == (plans.GRACE_SECONDS, 60)


def test_the_first_process_of_a_container_is_the_keeper_which_has_its_lease_and_its_key() -> None:
    plan = make([1, 2])
    for host_plan in plan.hosts:
        assert host_plan.command[-5:] == ["python3", "-P", "-m", "keeper", str(host_plan.node_rank)]
        assert "/var/lib/muster/lease/lease:/muster/lease/lease" in host_plan.command
        assert f"/run/muster/{plan.run}:/muster/private:ro" in host_plan.command
    assert [host_plan.keeper_port for host_plan in plan.hosts] == [29400, 29401]


def test_ranks_find_a_second_free_port_of_the_master() -> None:
    plan = make([1, 2])
    assert plan.free_port == 29513
    assert all(place.environment["MUSTER_FREE_PORT"] == "29513" for place in places(plan))


def test_the_output_of_ranks_is_kept_by_their_keeper_alone() -> None:
    host_plan = make([2]).hosts[0]
    assert not {"--tee", "--log-dir"} & set(agent(make([2])))
    assert host_plan.command[host_plan.command.index("--log-opt") + 1] == "max-size=1mb"


def test_a_plan_reads_back_as_it_was_written() -> None:
    plan = make([1, 2], Options(script="main.py"))
    assert plans.from_document(json.loads(json.dumps(asdict(plan)))) == plan
    for wrong in ({}, {"schema": "muster.plan/3"}, {"schema": plans.SCHEMA}, {"schema": plans.SCHEMA, "hosts": [{}]}):
        with pytest.raises(ValueError, match="plan"):
            plans.from_document(wrong)


RUN = "20260101-000000-abcd"


def forged(**more: Any) -> dict[str, Any]:
    """A plan.json with these values, in the plan or in its first host, and the hash that fits."""
    made = make([1, 2])
    found: dict[str, Any] = json.loads(json.dumps(plans.document(made)).replace(made.sha256, ""))
    for key, value in more.items():
        (found if key in found else found["hosts"][0])[key] = value
    return {**found, "sha256": hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "../../x"},
        {"run": "20260101-000000-ffff"},
        {"run_dir": "/var/lib/muster/runs/20260101-000000-abcd/../../../etc"},
        {"run_dir": "$(reboot)"},
        {"run_dir": "/var/lib/muster/runs/20251231-000000-ffff/runs/20260101-000000-abcd"},
        {"node_rank": 1},
        {"ranks": []},
        {"ranks": 3},
        {"hosts": []},
        {"grace": "soon"},
        {"resume": ["x"]},
        *({"host": name} for name in ("", "..", "../x", "/etc", "a/b", "h\x1b[2J", "h\0", 3)),
    ],
)
def test_a_plan_that_a_host_forged_is_none(wrong: dict[str, Any]) -> None:
    assert plans.received(forged(), RUN).run == plans.received(forged(host="2001:db8::1"), RUN).run == RUN
    with pytest.raises(ValueError, match="plan"):
        plans.received(forged(**wrong), RUN)


@pytest.mark.parametrize("wrong", [{"sha256": ""}, {"sha256": "a"}, {"sha256": None}, {"grace": 31}, {"args": ["--x"]}])
def test_a_plan_whose_hash_is_not_its_own_is_none(wrong: dict[str, Any]) -> None:
    made = json.loads(json.dumps(asdict(make([1, 2], Options(script="main.py")))))
    assert plans.received(made, RUN).sha256 == make([1, 2], Options(script="main.py")).sha256
    for found in ({**made, **wrong}, [made], "plan", None):
        with pytest.raises(ValueError, match="plan"):
            plans.received(found, RUN)


@pytest.mark.slow
def test_the_plan_for_many_hosts_is_made_at_once() -> None:
    begun = time.process_time()
    assert len(make([1] * 10_000).hosts) == 10_000
    assert time.process_time() - begun < 5  # it takes 0.5 s; nothing in it may grow with the square


def test_a_horovod_script_is_started_in_horovods_environment() -> None:
    options = Options(script="main.py", launcher="horovod", args=("--epochs", "3"))
    words = [*("--no-python", "--"), *plans.HOROVOD_SCRIPT, *("main.py", "--epochs", "3")]
    assert agent(make([1, 1], options))[-len(words) :] == words


def test_nccls_flight_recorder_is_on_where_there_are_gpus() -> None:
    on, off = (make([1], gpus=gpus).hosts[0].environment for gpus in (True, False))
    assert on["TORCH_FR_DUMP_TEMP_FILE"].startswith("/muster/run/stacks/") and "TORCH_FR_DUMP_TEMP_FILE" not in off
    assert "MIOPEN_USER_DB_PATH" not in on


def test_amds_library_for_convolutions_has_a_folder_that_it_may_write_to() -> None:
    nvidia = cluster(1, gpus=True)
    amd = replace(nvidia, hosts=[replace(nvidia.hosts[0], gpu_vendor="amd")])
    ports = Ports(29500, 29501, (29400,))
    environment = plans.make_plan(amd, Options(), "20260101-000000-abcd", ports, "me@here", "now").hosts[0].environment
    folders = {environment[name] for name in ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")}
    assert folders == {f"{SCRATCH_DIR}/miopen"} and "TORCH_FR_DUMP_TEMP_FILE" in environment
