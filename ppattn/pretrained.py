"""Published weights: downloaded once, converted once, then read from the cache.

PPATTN_CACHE: where they are kept (default: ~/.cache/ppattn).
PPATTN_MIRROR: the address of a mirror, or a folder, that holds the files under their published names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from ppattn.download import fetch, locked
from ppattn.errors import UserError

PACKAGE = Path(__file__).parent


def weights_file(name: str, published: dict[str, str], build: Callable) -> Path:
    """The weights of a model, in a file of this project.

    Args:
        name: of the model.
        published: where its authors have them: `url`, with `sha256` (or how it begins) where they give it; or `page`;
            or `file` in this package.
        build: makes the model that the weights are converted for.

    Raises:
        UserError: where there is no address, or it does not give the weights of this model.
    """
    if "file" in published:
        return PACKAGE / published["file"]
    command = f"`python tools/convert.py --model {name} --from FILE --output {name}.safetensors`"
    if "url" not in published:
        if "page" not in published:
            raise UserError(
                f"No published weights of {name} are known; `tools/list.py models` shows which models have them."
            )
        raise UserError(
            f"The weights of {name} have no address of their own: get them from {published['page']}, then {command}."
        )
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppattn"
    cache = Path(os.environ.get("PPATTN_CACHE") or default)
    converted = cache / f"{name}.safetensors"
    if not converted.is_file():
        downloaded = _downloaded(name, published, cache, f"Or get the file by hand and convert it: {command}.")
        with locked(cache):
            if not converted.is_file():
                _convert(build(), downloaded, converted)
        if downloaded.parent == cache:
            downloaded.unlink(missing_ok=True)
    return converted


def _downloaded(name: str, published: dict[str, str], cache: Path, advice: str) -> Path:
    """The file as it is published, from the mirror or its address."""
    url, mirror = published["url"], os.environ.get("PPATTN_MIRROR", "")
    file = Path(urlsplit(url).path).name
    file = file if Path(file).suffix else f"{name}.pth"
    if mirror and "://" not in mirror:
        if not (Path(mirror) / file).is_file():
            raise UserError(f"PPATTN_MIRROR is the folder {mirror}, which has no {file}; it is published at {url}.")
        return Path(mirror) / file
    urls = [f"{mirror.rstrip('/')}/{file}"] if mirror else [url]
    digest = ("sha256", published["sha256"]) if "sha256" in published else None
    return fetch(urls, cache / file, f"{name}: {file}", digest, advice)


def _convert(model, source: Path, target: Path) -> None:
    from ppattn import weights

    try:
        report = weights.convert(model, source)
    except UserError:
        if source.parent == target.parent:
            source.unlink()  # what is of no use is not kept in the cache
        raise
    facts = {"name": model.name, "img_size": list(model.img_size), **report.constants}
    weights.save(target, model.state_dict(), {"config": {"model": facts}})
