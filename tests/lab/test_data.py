"""Promise: `make data` brings a dataset to every host, as /data of runs; of a changed one only what differs; it goes on
where a host's part was killed; make check names the host whose files are others; a teardown asks first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.conftest import HOSTS, SMALL, Lab, must, wait_for
from tests.train.dataset_files import write_stl10

pytestmark = pytest.mark.lab
DATA = "/var/lib/muster/data"


@pytest.fixture
def source(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    write_stl10(tmp_path)
    (tmp_path / "big").write_bytes(os.urandom(120 << 20))
    yield tmp_path
    must(lab.fab("data", NAME="stl10", REMOVE=1))
    for host in HOSTS:
        assert lab.on(host, f"ls {DATA}") == ""


def test_a_dataset_comes_to_all_hosts_and_a_run_sees_it(lab: Lab, source: Path) -> None:
    first = lab.start("data", SRC=str(source), NAME="stl10")
    arriving = f"cat {DATA}/stl10/.*.parts/.*.part 2>/dev/null | wc -c"
    wait_for(lambda: int(lab.on("h2", arriving, check=False) or 0) > 10 << 20, "a part of the large file", 120)
    lab.on("h2", "pkill -KILL -f '[m]uster_data'", check=False)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0, said
    came = {host: float(size) for host, size in re.findall(r"(h\d): (\S+) MiB came", said)}
    assert came.keys() == set(HOSTS) and came["h1"] > 119 > 115 > came["h2"], said  # it had had more than 10

    must(lab.fab("train", ARGS=f"--dataset stl10 --epochs 1 --batch-size 4 --image-size 32 {SMALL}", NODES=2))

    (source / "more").write_bytes(b"more")
    again = must(lab.fab("data", SRC=str(source), NAME="stl10"))
    assert "Distributing 1 files, 4 bytes" in again and re.search(r"h3: \S+ bytes came, 0 bytes from", again), again
    must(lab.fab("deploy"))
    lab.on("h2", f"cd {DATA}/stl10/*/ && echo other > more")
    checked = lab.fab("check", FORECAST="0", NODES=2)
    assert checked.returncode != 0 and re.search(r"data, host h2: .* no longer those that `make data`", checked.stdout)
    refused = lab.fab("teardown")
    assert refused.returncode == 2 and "stl10 (1" in refused.stdout, refused.stdout
