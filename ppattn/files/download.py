"""Download files with a progress bar and a checksum; a transfer that breaks off is resumed."""

import http.client
import os
import time
import zlib
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ppattn.errors import UserError
from ppattn.files.atomic import checksum

ATTEMPTS = 5
SECONDS = 20.0  # without an answer


def fetch(urls: list[str], target: Path, title: str, digest: tuple[str, str] | None = None, advice: str = "") -> Path:
    """Download a file from the first address that works; an existing file is kept if its digest fits.

    A transfer that breaks off is resumed, and with a digest also by a later call. Callers hold `locked(target.parent)`.
    `title` is what the progress bar and the error call it, `advice` the end of the error if no address works; `digest`
    is hashlib's algorithm and the beginning of the hexadecimal digest.
    """
    algorithm, beginning = digest or ("sha256", "")

    def fits(file: Path) -> bool:
        return not beginning or checksum(file, algorithm).startswith(beginning)

    if target.is_file() and fits(target):
        return target
    reasons = []
    for url in urls:
        partial = target.with_name(f".{target.name}.{zlib.crc32(url.encode()):08x}.part")
        if not beginning:
            partial.unlink(missing_ok=True)  # of another version, perhaps
        try:
            _transfer(url, partial, title)
            if not fits(partial):
                partial.unlink()
                raise OSError(f"wrong checksum, {algorithm} should begin with {beginning}")
            return partial.replace(target)
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
    raise UserError(f"{title} cannot be downloaded ({'; '.join(reasons)}). {advice}".rstrip())


def _transfer(url: str, partial: Path, title: str) -> None:
    """Fetch into `partial` until it is as long as the server announced."""
    from tqdm import tqdm

    version: dict[str, str] = {}
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)
        start = partial.stat().st_size if partial.exists() else 0
        try:
            headers = {"Range": f"bytes={start}-", **version} if start else {}
            answer = urlopen(Request(url, headers=headers), timeout=SECONDS)
        except HTTPError as error:
            if error.code != 416:  # the server has nothing beyond what is here, which may be another file's
                raise
            partial.unlink()
            continue
        with answer:
            if answer.headers.get_content_type() == "text/html":
                raise OSError("the answer is a web page, not the file")
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "W/"
            version = {} if tag.startswith("W/") else {"If-Range": tag}  # of another version the server sends all
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
                file.flush()
                os.fsync(file.fileno())
                have = file.tell()
        if total in (None, have):
            return
    raise OSError(f"the transfer broke off {ATTEMPTS} times, at last after {partial.stat().st_size} bytes")
