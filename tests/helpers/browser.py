"""Chromium without a window, driven through chromedriver's HTTP interface (W3C WebDriver), and a server of a folder."""

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
needs_browser = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed (Debian: apt-get install chromium chromium-driver)"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's key of an element's id


class Browser:
    """One window; `width` and `height` in CSS pixels."""

    def __init__(self, driver: str, profile: Path, width: int, height: int):
        arguments = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
        arguments += ["disable-background-networking", "disable-component-update", f"user-data-dir={profile}"]
        options = {
            "args": arguments,
            "mobileEmulation": {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 1, "touch": False}},
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address = f"{driver}/session"
        self.address += "/" + self.send("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def send(self, method: str, path: str, body: dict | None = None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        self.send("POST", "/url", {"url": address})

    def run(self, script: str, *arguments):
        """What the function body `script` returns."""
        return self.send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments, seconds: float = 600):
        """The value of the expression `script` as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < end, f"{script} did not become true: {self.run('return document.body.innerText')}"
            time.sleep(0.02)
        return value

    def upload(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type="file">."""
        found = self.send("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self.send("POST", f"/element/{found}/value", {"text": str(file)})

    def point(self, selector: str, places: list[tuple[float, float]]) -> None:
        """Press the mouse at the first place, move over the others, release; places are parts of width and height."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]",
            selector,
        )
        steps: list[dict] = []
        for x, y in places:
            at = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3])}
            steps += [{"type": "pointerMove", "duration": 0, "origin": "viewport", **at}]
            steps += [{"type": "pointerDown", "button": 0}] if len(steps) == 1 else []
        steps += [{"type": "pointerUp", "button": 0}]
        self.send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]})

    def problems(self) -> list[str]:
        """Errors in the console since the last call."""
        log = self.send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def browser(folder: Path, width: int, height: int):
    """A window; `folder` is an empty or new one for what Chromium writes."""
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        try:
            lines = (line for line in driver.stdout or () if "started successfully on port" in line)
            port = next(lines).rsplit(" ", 1)[1].strip(" .\n")
            window = Browser(f"http://127.0.0.1:{port}", folder, width, height)
            try:
                yield window
            finally:
                window.send("DELETE", "")
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
