"""Look for faults in a data set before training: unreadable images, empty classes, duplicates."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from ppattn.data.cifar import CIFAR, find_cifar
from ppattn.data.folders import class_folders, find_folders, image_files
from ppattn.data.images import ImageError, is_one_colour
from ppattn.data.lists import find_lists
from ppattn.data.shards import named_shards
from ppattn.data.splits import Split, Splits
from ppattn.errors import UserError
from ppattn.runtime.cpu import available_cores
from ppattn.text import printable

SHOWN = 20


def guess_data(root: Path) -> dict[str, str]:
    """The `data` settings for the layout at `root`: `name`, which is folder, list, shards, cifar10 or cifar100.

    List files take precedence over the folders that they name, and both over an archive. Class folders without train/
    and val/ are named as both parts. Where nothing is recognised it is `folder`, whose reader says what is missing.
    """
    if root.is_file():  # an archive of CIFAR, whose reader says where it is another
        return {"name": "cifar100" if "100" in root.name else "cifar10"}
    if not root.is_dir():
        raise UserError(f"--data {str(root)!r} is not a folder with a data set, nor a CIFAR archive.")
    if find_lists(root)[1][0]:
        return {"name": "list"}
    place, parts = find_folders(root)
    classes, packed = parts[0] is not None, any(path.is_file() for path in named_shards(root, "train"))
    if classes and packed:
        raise UserError(f"{root} holds class folders and shards: say which with -c, in a config with data.name.")
    if classes or packed:
        return {"name": "shards" if packed else "folder"}
    if name := next((name for name, kind in CIFAR.items() if find_cifar(root, kind)), None):
        return {"name": name}
    plain = not any(parts) and any(any(image_files(path)) for path in class_folders(place).values())
    inside = str(place.relative_to(root))
    return {"name": "folder", **({"train": inside, "val": inside} if plain else {})}


def _digests(split: Split) -> Iterator[tuple[bytes | str, bool]]:
    """The hash of every image's pixels and whether they hardly differ, or what is wrong with it; by several threads."""

    def digest(i: int) -> tuple[bytes | str, bool]:
        try:
            image = split.image(i)
        except ImageError as error:
            return str(error), False
        content = repr(image.shape).encode() + image.tobytes()
        return hashlib.blake2b(content, digest_size=16).digest(), is_one_colour(image)

    with ThreadPoolExecutor(available_cores()) as pool:
        for start in range(0, len(split), 256):  # a bounded number of images in memory
            yield from pool.map(digest, range(start, min(start + 256, len(split))))


def check_splits(splits: Splits, parts: Sequence[str] = ("train", "val")) -> dict:
    """Faults of each split; images in both (`duplicates`) or with two labels (`conflicts`); whether all is `ok`."""
    report: dict = {"classes": len(splits.classes)}
    seen: dict[bytes, tuple[str, str, str]] = {}  # part, name and class of the first of equal images
    duplicates, conflicts = [], []
    for part in parts:
        split = getattr(splits, part)
        counts = split.counts(len(splits.classes)).astype(int).tolist()
        unreadable, flat, different = list[dict[str, str]](), list[str](), set[bytes]()
        found = tqdm(_digests(split), total=len(split), desc=part, unit="image", disable=None)
        for i, (digest, constant) in enumerate(found):
            name, label = split.name(i), splits.named(split, i)
            if isinstance(digest, str):
                unreadable.append({"name": name, "reason": digest})
                continue
            different.add(digest)
            flat += [name] * constant
            where, same, other = seen.setdefault(digest, (part, name, label))
            if where != part:
                duplicates.append([same, name])
            if label != other:
                conflicts.append([f"{same} ({other})", f"{name} ({label})"])
        report[part] = {
            "images": len(split),
            "left_out": split.left_out,
            "images_per_class": dict(zip(splits.classes, counts, strict=False)),
            "empty_classes": [name for name, count in zip(splits.classes, counts, strict=False) if count == 0],
            "unreadable": unreadable,
            "nearly_one_colour": flat,
            "copies_within": len(split) - len(unreadable) - len(different),
        }
    faults = [report[part][key] for part in parts for key in ("unreadable", "empty_classes")]
    return report | {"duplicates": duplicates, "conflicts": conflicts, "ok": not any([duplicates, conflicts, *faults])}


def data_summary(report: dict) -> str:
    """The report as lines of text; lists are cut to `SHOWN` entries."""
    lines = [f"{report['classes'] or 'no'} classes"]
    findings: dict[str, list[str]] = {}
    for part, of in [(part, report[part]) for part in ("train", "val") if part in report]:
        counts = of["images_per_class"].values()
        others = f"{of['copies_within']} copies of another image in it, {of['left_out']} files left out"
        per_class = f"{min(counts)} to {max(counts)} per class, " if counts else ""
        lines.append(f"{part}: {of['images']} images, {per_class}{others}")
        findings[f"unreadable in {part}"] = [entry["reason"] for entry in of["unreadable"]]
        flat = f"nearly of one colour in {part} (16 bits in part unused? see data.max_value)"
        findings[flat] = of["nearly_one_colour"]
        findings[f"classes without an image in {part}"] = of["empty_classes"]
    findings["in both splits"] = [f"{first} = {second}" for first, second in report["duplicates"]]
    findings["one image under two labels"] = [f"{first} = {second}" for first, second in report["conflicts"]]
    for title, entries in findings.items():
        if entries:
            lines.append(f"{title}: {len(entries)}")
            lines += [f"  {printable(entry)}" for entry in entries[:SHOWN]]
            lines += [f"  ... and {len(entries) - SHOWN} more"] if len(entries) > SHOWN else []
    return "\n".join(lines)
