"""Chromium through ChromeDriver, and what is to be seen of a page that it has opened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

#: The machine may have no network, and no screen; the tests may run as root, in which Chromium has no sandbox.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for something elsewhere does not get it, anywhere
)
HEIGHT = 900
DRAWN_SECONDS = 30.0

#: Whether every drawing is there.
DRAWN = "return [...document.querySelectorAll('.drawing')].every((place) => place.querySelector('svg g'))"

LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Seen:
    """A page as somebody sees it; all but the first two as look.js says it."""

    console: Sequence[str]
    requests: Sequence[str]  # addresses
    drawings: Sequence[dict[str, Any]]
    overlaps: Sequence[str]
    texts: int
    unreadable: Sequence[str]
    width: dict[str, Any]
    ground: str  # the page's colour


class Chromium:
    """One browser. A page stays open until the next one is opened."""

    def __init__(self, folder: Path) -> None:
        """folder: for all that the browser writes."""
        options = ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for option in (*OPTIONS, f"--user-data-dir={folder}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # A session of its own, so that all of its processes can be ended together.
        self._service = Service("/usr/bin/chromedriver", popen_kw={"start_new_session": True})
        self.driver = Chrome(options=options, service=self._service)

    def end(self) -> None:
        with contextlib.suppress(Exception):  # whatever it is, what is left of it is killed
            self.driver.quit()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._service.process.pid, signal.SIGKILL)

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        """Open a page on a screen so wide, for a reader who wants it light or dark, and wait for its drawings."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.resize(width)
        self.driver.get("about:blank")
        self.logs("browser"), self.logs("performance")  # of what was open before
        self.driver.get(page.as_uri())
        self.wait_for(DRAWN)

    def resize(self, width: int) -> None:
        screen = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def run(self, script: str) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script)

    def wait_for(self, script: str) -> None:
        """Wait until a script in the page returns something true. Raises TimeoutException."""
        WebDriverWait(self.driver, DRAWN_SECONDS, 0.05).until(lambda driver: driver.execute_script(script))

    def logs(self, kind: str) -> list[Any]:
        """New lines of "browser", the console, or of "performance"."""
        found: list[Any] = self.driver.get_log(kind)
        return found

    def see(self, page: Path, width: int, scheme: str) -> Seen:
        """Open a page with all that can be unfolded unfolded, and look at it."""
        self.open(page, width, scheme)
        self.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        messages = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        asked = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return Seen(
            console=[f"{entry['level']}: {entry['message']}" for entry in self.logs("browser")],
            requests=[params["request"]["url"] for params in asked],
            **self.run(f"{LOOK}\nreturn look();"),
        )
