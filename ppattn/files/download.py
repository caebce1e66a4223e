"""Download files with a progress bar and a checksum; a transfer that breaks off is resumed."""

from __future__ import annotations

import base64
import http.client
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ppattn.errors import UserError
from ppattn.files.atomic import checksum

ATTEMPTS = 5
SECONDS = 20.0  # without an answer


def fetch(urls: list[str], target: Path, title: str, digest: tuple[str, str] | None = None, advice: str = "") -> Path:
    """Download a file from the first address that works; an existing file is kept.

    A transfer that breaks off is resumed, and with a digest also by a later call. Callers hold `locked(target.parent)`.

    Args:
        urls: with login or without (`https://user:password@host/file`).
        title: what the progress bar and the error call it.
        digest: hashlib's algorithm and the beginning of the hexadecimal digest; None: not compared.
        advice: the end of the error if no address works.
    """
    if target.is_file():
        return target
    reasons = []
    for url in urls:
        parts = urlsplit(url)
        login, _, host = parts.netloc.rpartition("@")
        address = parts._replace(netloc=host).geturl()
        partial = target.with_name(f".{target.name}.{zlib.crc32(url.encode()):08x}.part")
        if digest is None:
            partial.unlink(missing_ok=True)  # of another version, perhaps
        try:
            request = urllib.request.Request(address)
            if login:
                code = base64.b64encode(unquote(login).encode()).decode()
                request.add_unredirected_header("Authorization", f"Basic {code}")
            _transfer(request, partial, title)
            if digest is not None and not checksum(partial, digest[0]).startswith(digest[1]):
                partial.unlink()
                raise OSError(f"wrong checksum, {digest[0]} should begin with {digest[1]}")
            return partial.replace(target)
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reasons.append(f"{address}: {getattr(error, 'reason', error)}")
    raise UserError(f"{title} cannot be downloaded ({'; '.join(reasons)}). {advice}".rstrip())


def _transfer(request: urllib.request.Request, partial: Path, title: str) -> None:
    """Fetch into `partial` until it is as long as the server announced."""
    from tqdm import tqdm

    for attempt in range(ATTEMPTS):
        time.sleep(attempt)
        start = partial.stat().st_size if partial.exists() else 0
        if start:
            request.add_header("Range", f"bytes={start}-")
        else:
            request.remove_header("Range")
        try:
            answer = urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            if error.code != 416:  # the file there is not longer than what is here
                raise
            if error.headers.get("Content-Range") == f"bytes */{start}":
                return
            partial.unlink()
            continue
        with answer:
            if answer.headers.get_content_type() == "text/html":
                raise OSError("the answer is a web page, not the file")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
            if version and not version.startswith("W/"):
                request.add_header("If-Range", version)  # of another version the server sends all
            start = start if answer.status == 206 else 0
            length = answer.headers.get("Content-Length", "")
            total = start + int(length) if length.isdecimal() else None
            with partial.open("ab" if start else "wb") as file:
                try:
                    with tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=title) as bar:
                        while block := answer.read(1 << 20):
                            bar.update(file.write(block))
                except (ConnectionError, TimeoutError, http.client.IncompleteRead):
                    continue
                have = file.tell()
        if total in (None, have):
            return
    raise OSError(f"the transfer broke off {ATTEMPTS} times, at last after {partial.stat().st_size} bytes")
