"""A headless Chromium, driven over a pipe by the DevTools protocol, and Node."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
needs_node = pytest.mark.skipif(NODE is None, reason="Node is not installed")
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    "--no-default-browser-check",
    *("--remote-debugging-pipe", "--window-size=1200,1500", "about:blank"),
)


class Chromium:
    """A browser with one open page.

    Args:
        folder: An empty folder for its profile.

    """

    def __init__(self, folder: Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}

        def connect():
            # Chromium reads from 3 and writes to 4; by way of others, should those be in use.
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [str(EXECUTABLE), f"--user-data-dir={folder / 'profile'}", *OPTIONS],
            close_fds=False,
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **home},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._received = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        (target,) = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + 60
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            part = os.read(self._read, 2**20) if ready else b""
            if not part:
                raise RuntimeError(f"Chromium does not answer (exit code {self._process.poll()}).")
            self._received += part
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path) -> None:
        """Load a page and wait for it."""
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """Return what a JavaScript expression gives."""
        result = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return what a JavaScript expression gives once that is true, or after a minute."""
        end = time.monotonic() + 60
        while not (found := self.run(script)) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements of a selector."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")

    def move_to(self, element: str) -> None:
        """Move the mouse over the middle of what a JavaScript expression gives."""
        place = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2]; }})({element})"
        )
        self("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        self._place = place

    def click(self, element: str) -> None:
        """Move there and click."""
        self.move_to(element)
        x, y = self._place
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key that writes nothing, such as Tab or ArrowRight."""
        codes = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def prefer(self, scheme: str) -> None:
        """Set the system's colours: light or dark."""
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the console and the log say since the page was opened."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


@contextmanager
def opened(profile: Path, page: Path | None = None) -> Iterator[Chromium]:
    """Yield a browser with a new profile, and a page open in it."""
    profile.mkdir()
    browser = Chromium(profile)
    try:
        if page is not None:
            browser.open(page)
        yield browser
    finally:
        browser.close()


def in_node(program: str, *arguments: Any) -> Any:
    """Return what a module of JavaScript prints in JSON."""
    command = [str(NODE), "--input-type=module", "-e", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
