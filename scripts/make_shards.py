"""Pack class folders or list files into WebDataset tar shards, byte for byte and in random order.

python scripts/make_shards.py --data photos --output photos-shards
python scripts/make_shards.py -c my.yaml -o data.root=/data/imagenet --output /data/imagenet-shards

Then train with -o data.name=shards -o data.root=OUTPUT. The folder also gets classes.txt.
"""

import argparse
import io
import re
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from ppattn.cli import OPTIONS, guarded
from ppattn.config import load_config, override_config
from ppattn.data import build_datasets
from ppattn.data.check import guess_data
from ppattn.data.splits import FileSplit
from ppattn.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-c", "--config", metavar="YAML", help="the configuration whose data to pack")
    what.add_argument("--data", metavar="DIR", help="class folders or list files")
    parser.add_argument("-o", "--override", **OPTIONS["shared"]["override"])
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--per-shard", type=int, default=1000, help="images in a shard (default 1000)")
    args = parser.parse_args()
    sys.exit(guarded(lambda: pack(args)))


def pack(args) -> None:
    if args.per_shard < 1:
        raise UserError(f"--per-shard {args.per_shard} is not allowed: at least 1.")
    if args.config:
        config, _ = load_config(args.config, args.override)
    else:
        data = {"name": guess_data(Path(args.data))["name"], "root": args.data}
        config = override_config({"data": data}, args.override)
    splits = build_datasets(config)
    if not isinstance(getattr(splits.train, "split", splits.train), FileSplit) or splits.train.table is not None:
        raise UserError(f"{config.data.location} cannot be packed: only folders and lists with one label an image can.")
    output = Path(args.output)
    for part in ("train", "val"):
        paths = write_shards(getattr(splits, part), output, part, args.per_shard)
        print(f"{part}: {len(getattr(splits, part))} images in {len(paths)} shards")
    (output / "classes.txt").write_text("".join(f"{i}\t{s}\n" for i, s in enumerate(splits.classes)), encoding="utf-8")


def write_shards(split: FileSplit, folder: Path, prefix: str, per_shard: int = 1000, seed: int = 0) -> list[Path]:
    """Write class folders or a list file as shards `prefix-000000.tar`, ... of `per_shard` samples, byte for byte.

    The order is random, because readers shuffle locally: classes must be spread here.

    Raises:
        UserError: if shards of this name exist already, or an image's file cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if list(folder.glob(f"{prefix}-*.tar")):
        raise UserError(f"{folder} already has shards {prefix}-*.tar; remove them or choose another folder.")
    order = np.random.default_rng(seed).permutation(len(split)).tolist()
    paths = []
    with tqdm(total=len(order), desc=prefix, unit="image", disable=None) as progress:
        for start in range(0, len(order), per_shard):
            paths.append(folder / f"{prefix}-{len(paths):06d}.tar")
            with tarfile.open(paths[-1], "w") as tar:
                for number, i in enumerate(order[start : start + per_shard], start):
                    source = Path(split.root, split.key(i))
                    key = f"{number:08d}-{re.sub(r'[^0-9A-Za-z_-]', '_', source.stem)[:60]}"
                    try:
                        image = source.read_bytes()
                    except OSError as error:
                        raise UserError(f"Cannot read image {source}: {error.strerror}.") from None
                    for suffix, data in ((source.suffix.lower(), image), (".cls", str(split.label(i)).encode())):
                        member = tarfile.TarInfo(key + suffix)
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
                    progress.update()
    return paths


if __name__ == "__main__":
    main()
