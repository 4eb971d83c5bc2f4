"""What all tests share: what a lab test needs is made first, nothing hangs, and failures are printed at once. Other
tests connect to this machine alone.

With CI=true a test that cannot run fails instead of being skipped.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from rich.console import Console
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
PREPARATION_SECONDS = 1800  # of a lab test: packages, wheels, images and the lab may have to be made first
sys.path.insert(0, str(ROOT))

from containers.files import locked  # noqa: E402
from launch.cli.make_variables import KNOWN  # noqa: E402
from tests import sweep  # noqa: E402

# On a busy machine an example may take longer than Hypothesis allows by itself. `make test-all` searches in full.
settings.register_profile("all", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("muster", settings.get_profile("all"), max_examples=25)
settings.load_profile("muster")
os.environ.pop("MAKEFLAGS", None)  # of the `make test` that runs us: not meant for the commands that the tests start


def cannot_run(reason: str) -> NoReturn:
    """Skip, or fail where everything has to run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"cannot run here, and with CI=true that is a failure: {reason}")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of Muster are typed at the top of the checkout; variables of the caller's make must not leak in."""
    monkeypatch.chdir(ROOT)
    for name in os.environ.keys() & KNOWN:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _stays_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that is not the lab's connects to loopback alone: a made-up address may be somebody's, such as a lab's."""
    connect, tried = socket.socket.connect, list[str]()

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            tried.append(f"{address[0]}:{address[1]}")
            raise OSError(errno.ENETUNREACH, "a test may connect to loopback alone")
        connect(self, address)

    if not is_lab(request.node):
        monkeypatch.setattr(socket.socket, "connect", connect_here)
    yield
    assert not tried, f"the test tried to connect to {', '.join(tried)}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def installing() -> AbstractContextManager[None]:
    """The one that installs Debian's packages on this machine: sessions and workers run at the same time."""
    return locked(ROOT / "build" / "packages.lock")


@pytest.fixture(scope="session")
def container_engine() -> None:
    """This machine as `make demo` makes it ready: Podman and the other tools, installed and tried. For lab tests."""
    from launch.deploy import control

    if not control.has_root():
        cannot_run("container hosts need root, or sudo without a password")
    os.chdir(ROOT)
    with installing():
        control.ensure_ready(Console(width=120))


def pytest_configure(config: pytest.Config) -> None:
    """Mark what this session starts, so that the next one finds what a kill has left."""
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist belongs to the session that started it
        os.environ[sweep.SESSION] = str(os.getpid())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of `make test &` in a script: tests would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; GPU tests are skipped, also in CI, where there is no GPU."""
    has_gpu = bool(shutil.which("nvidia-smi")) and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, check=False, timeout=300
    ).stdout.startswith(b"GPU")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
        if is_lab(item) and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "container_engine")
        if is_lab(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PREPARATION_SECONDS))
    items.sort(key=_turn_of)


def is_lab(item: pytest.Item) -> bool:
    """Whether a test needs container hosts."""
    return item.get_closest_marker("lab") is not None


def _turn_of(item: pytest.Item) -> int:
    """Where a test stands in the order of a session. With two workers, one makes the first lab and its snapshot, while
    the other one runs the tests of containers/. What takes a lab apart comes last."""
    if not is_lab(item):
        return 0
    if item.path.name == "test_first_deploy.py":
        return 1
    if item.path.name == "test_teardown.py":
        return 4
    return 2 if "lab" not in getattr(item, "fixturenames", ()) else 3


#: Lab tests whose module makes something for all of them, or whose tests use the same image or user of this machine:
#: one worker runs them.
TOGETHER = (
    "tests/lab/test_first_deploy.py", "tests/lab/test_privileges.py", "tests/containers/test_lab.py",
    "tests/containers/test_own_base.py", "tests/lab/test_build_on.py",
)  # fmt: skip


class _Scheduler(LoadScopeScheduling):
    """Hands tests to workers one by one, in order, but those of TOGETHER by file. (pytest-xdist 3.8's own groups have
    no effect with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file in TOGETHER else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return _Scheduler(config, log) if config.option.dist == "loadgroup" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before lab tests: remove what sessions that were killed have left; it would slow this one down."""
    if any(map(is_lab, session.items)) and not session.config.option.collectonly:
        with locked(ROOT / "build" / "sweep.lock"):
            for line in sweep.sweep():
                print(f"swept: {line}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens: a session that is killed never comes to its summary."""
    if report.failed:
        print(f"\n{report.when} of {report.nodeid} failed:\n{report.longreprtext}", flush=True)
        for title, text in report.sections:
            print(f"--- {title}\n{text}", flush=True)
