"""Pack class folders or list files into WebDataset tar shards, byte for byte and in random order.

python scripts/make_shards.py --data photos --output photos-shards
python scripts/make_shards.py -c my.yaml -o data.root=/data/imagenet --output /data/imagenet-shards

Then train with -o data.name=shards -o data.root=OUTPUT. The folder also gets classes.txt and an index of the labels.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import guarded, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-c", "--config", metavar="YAML", help="the configuration whose data to pack")
    what.add_argument("--data", metavar="DIR", help="class folders or list files")
    options.add_override(parser, "data.root=DIR")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--per-shard", type=int, default=1000, help="images in a shard (default 1000)")
    args = parser.parse_args()
    sys.exit(guarded(lambda: pack(args)))


def pack(args) -> None:
    from ppattn.config import load_config, make_config
    from ppattn.data import build_datasets
    from ppattn.data.check import guess_kind
    from ppattn.data.shards import write_shards
    from ppattn.data.splits import FileSplit
    from ppattn.errors import UserError

    if args.per_shard < 1:
        raise UserError(f"--per-shard {args.per_shard} is not allowed: at least 1.")
    if args.config:
        config, _ = load_config(args.config, args.override)
    elif args.override:
        raise UserError("-o changes a configuration; with --data there is none, use -c.")
    else:
        config = make_config({"data": {"name": guess_kind(Path(args.data)), "root": args.data}})
    splits = build_datasets(config)
    if not isinstance(splits.train, FileSplit):
        raise UserError(f"data.name = {config.data.name!r} is not made of image files: only folders and lists are.")
    output = Path(args.output)
    for part in ("train", "val"):
        paths = write_shards(getattr(splits, part), output, part, args.per_shard)
        print(f"{part}: {len(getattr(splits, part))} images in {len(paths)} shards")
    (output / "classes.txt").write_text("\n".join(splits.classes) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
