"""Look through a data set: unreadable files, empty classes, the same image in both splits."""

from argparse import Namespace
from pathlib import Path

from ppattn.cli import options
from ppattn.errors import UserError


def run(args: Namespace) -> None:
    from ppattn.config import load_config, override_config
    from ppattn.data import build_datasets
    from ppattn.data.check import check_splits, data_summary, guess_data
    from ppattn.data.shards import INDEX
    from ppattn.files.atomic import write_json

    if args.config:
        config, _ = load_config(args.config, args.override)
    else:
        data = {"root": args.data, "download": False} | guess_data(Path(args.data))
        config = override_config({"data": data}, args.override)
        print(f"read as data.name = {config.data.name}")
    if args.json:
        location = config.data.location
        options.check_output(args.json, [args.config, location, location / INDEX], ".json")
    splits = build_datasets(config)
    unlabelled = not config.data.labels and splits.train is splits.val  # class folders or images, no two parts yet
    whole = not config.data.held and (unlabelled or config.data.train == config.data.val is not None)
    report = check_splits(splits, ["train"] if whole else ["train", "val"])
    print(data_summary(report))
    if args.json:
        write_json(Path(args.json), report)
    if not report["ok"]:
        more = f"; the complete list is in {args.json}" if args.json else "; --json FILE writes the complete list"
        raise UserError(f"the data has the problems listed above{more}.")
    print("nothing wrong; to train, set data.holdout" if whole else "nothing wrong")
