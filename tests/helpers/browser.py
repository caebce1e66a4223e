"""Chromium without a window, driven through chromedriver's HTTP interface (W3C WebDriver), and a server of a folder."""

import contextlib
import shutil
import subprocess
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
needs_browser = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed (Debian: apt-get install chromium chromium-driver)"
)
QUIET = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
QUIET += ["disable-background-networking", "disable-component-update"]


class Browser:
    """One window; `width` and `height` in CSS pixels."""

    def __init__(self, driver: str, profile: Path, width: int, height: int):
        size = {"width": width, "height": height, "pixelRatio": 1, "touch": False}
        options = {"args": [*QUIET, f"user-data-dir={profile}"], "mobileEmulation": {"deviceMetrics": size}}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address = f"{driver}/session"
        self.address += "/" + self.post("", capabilities={"alwaysMatch": wanted})["sessionId"]

    def post(self, path: str, **body):
        answer = requests.post(self.address + path, json=body)
        assert answer.ok, answer.json()["value"]["message"]
        return answer.json()["value"]

    def open(self, address: str) -> None:
        self.post("/url", url=address)

    def run(self, script: str, *arguments):
        """What the function body `script` returns."""
        return self.post("/execute/sync", script=script, args=arguments)

    def wait(self, script: str, *arguments, seconds: float = 600):
        """The value of the expression `script` as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < end, f"{script} did not become true: {self.run('return document.body.innerText')}"
            time.sleep(0.02)
        return value

    def upload(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type="file">."""
        (element,) = self.post("/element", using="css selector", value=selector).values()
        self.post(f"/element/{element}/value", text=str(file))

    def point(self, selector: str, places: list[tuple[float, float]]) -> None:
        """Press the mouse at the first place, move over the others, release; places are parts of width and height."""
        left, top, width, height = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]",
            selector,
        )
        steps: list[dict] = [
            {"type": "pointerMove", "duration": 0, "x": round(left + x * width), "y": round(top + y * height)}
            for x, y in places
        ]
        steps[1:1] = [{"type": "pointerDown", "button": 0}]
        steps += [{"type": "pointerUp", "button": 0}]
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": steps}])

    def problems(self) -> list[str]:
        """Errors in the console since the last call."""
        return [entry["message"] for entry in self.post("/se/log", type="browser") if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def browser(folder: Path, width: int, height: int):
    """A window; `folder` is an empty or new one for what Chromium writes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(["chromedriver", "--port=0"], **pipes) as driver:
        try:
            told = next(line for line in driver.stdout if "started successfully on port" in line)
            window = Browser("http://127.0.0.1:" + told.rsplit(" ", 1)[1].strip(" .\n"), folder, width, height)
            try:
                yield window
            finally:
                requests.delete(window.address)
        finally:
            driver.terminate()


@contextlib.contextmanager
def served(folder: Path):
    """The address of a web server of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
