"""How many images a second one core prepares, and how many the loader delivers, against paddle.vision.transforms.

python -m scripts.studies.bench_input
python -m scripts.studies.bench_input --cifar data/cifar10 --photos PHOTOS --workers 0 1 2 --output input.json

The work, done by both sides image by image with one thread, in turn; images per second of CPU time, median of rounds:
`notebook`: 32 px to 224 px, RandomResizedCrop, ColorJitter, flip, rotation, normalisation (without --cifar: noise);
`cifar`: 32 px, reflect-pad crop, flip, normalisation;
`photos`: with --photos, JPEG files, decode, RandomResizedCrop to 224 px, flip, normalisation;
`recipe`: ours alone, photos with RandAugment and random erasing.
`ppattn` is the whole of it, `worker` what a data worker does: up to normalisation, which the parent process does.
Paddle's transforms run on numpy arrays, that is on OpenCV as ours do. Then the loader as a whole, wall time, batches
of float32, for each number of workers.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from ppattn.cli import guarded
from ppattn.config import make_config
from ppattn.data import IMAGENET_MEAN, IMAGENET_STD, Preprocess, TrainLoader, TrainTransform, build_datasets
from ppattn.data.splits import ArraySplit, FileSplit, Split
from ppattn.errors import UserError
from ppattn.runtime.cpu import available_cores, cpuinfo
from ppattn.settings import Config

FLIP = {"horizontal_flip": 0.5}
CROP = {"random_resized_crop": {}, **FLIP}
COLOUR = {"random_resized_crop": {"scale": [0.6, 1.0]}, "color_jitter": [0.2] * 3, "rotation": 20.0}
RECIPE = {"rand_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.25}
WORKS: dict[str, tuple[int, str, dict]] = {  # pixels, interpolation, keys of the section `augment`
    "notebook": (224, "bilinear", COLOUR | FLIP),
    "cifar": (32, "bilinear", {"pad_crop": 4, **FLIP}),
    "photos": (224, "bicubic", CROP),
    "recipe": (224, "bicubic", CROP | RECIPE),
}


def paddle_transform(work: str):
    """The same work by Paddle, uint8 [h, w, 3] to a float32 tensor; None for what it has not."""
    from paddle.vision import transforms as T

    size, interpolation, _ = WORKS[work]
    crop = partial(T.RandomResizedCrop, size, interpolation=interpolation)
    flip, last = T.RandomHorizontalFlip(0.5), [T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    if work == "notebook":
        return T.Compose([crop(scale=(0.6, 1.0)), T.ColorJitter(0.2, 0.2, 0.2), flip, T.RandomRotation(20), *last])
    if work == "cifar":
        return T.Compose([T.RandomCrop(size, padding=4, padding_mode="reflect"), flip, *last])
    return T.Compose([crop(), flip, *last]) if work == "photos" else None


def speed(function, split: Split, count: int) -> float:
    """Images per second of CPU time."""
    start = time.process_time()
    for i in range(count):
        function(split.image(i % len(split)), i)
    return count / (time.process_time() - start)


def training(work: str, **data) -> tuple[Config, TrainTransform]:
    size, interpolation, augment = WORKS[work]
    config = make_config({"augment": augment, "data": data})
    return config, TrainTransform(config.augment, Preprocess(size, interpolation=interpolation))


def one_core(work: str, split: Split, count: int, rounds: int) -> dict:
    _, ours = training(work)
    sides = {
        "ppattn": lambda image, i: ours(image, np.random.default_rng([42, 0, i, 0])),
        "worker": lambda image, i: ours.pixels(image, np.random.default_rng([42, 0, i, 0])),
    }
    if theirs := paddle_transform(work):
        sides["paddle"] = lambda image, i: theirs(image)
    for function in sides.values():  # warm up
        speed(function, split, min(count, 20))
    found = [{name: speed(function, split, count) for name, function in sides.items()} for _ in range(rounds)]
    result = {name: round(statistics.median(speeds[name] for speeds in found), 1) for name in sides}
    ratios = ("ppattn", "worker") if theirs else ()
    return result | {f"{name}/paddle": round(result[name] / result["paddle"], 2) for name in ratios}


def whole_loader(work: str, split: Split, workers: int, steps: int, batch: int) -> float:
    config, transform = training(work, batch_size=batch, num_workers=workers)
    with closing(TrainLoader(split, 1, transform, config)) as loader:
        warm = 2 * workers + 1  # as many as may be under way from the start
        for step in range(warm + steps):
            if step == warm:
                start = time.perf_counter()
            list(loader.micro_batches(step))
        return round(steps * batch / (time.perf_counter() - start), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", metavar="DIR", help="CIFAR-10; random pixels where not given")
    parser.add_argument("--photos", type=Path, metavar="DIR", help="a folder of JPEG files, at any depth")
    parser.add_argument("--count", type=int, default=1000, help="images per round (default 1000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="numbers of loader workers to try")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args()
    sys.exit(guarded(lambda: measure(args)))


def measure(args) -> None:
    cv2.setNumThreads(1)
    if args.cifar:
        small = build_datasets(make_config({"data": {"name": "cifar10", "root": args.cifar, "download": False}})).train
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (20000, 32, 32, 3)).astype(np.uint8)
        small = ArraySplit(pixels, np.zeros(len(pixels)), "random")
    sources = {"notebook": small, "cifar": small}
    if args.photos:
        root = args.photos
        paths = [str(p.relative_to(root)) for p in sorted(root.rglob("*")) if p.suffix.lower() in (".jpg", ".jpeg")]
        if not paths:
            raise UserError(f"--photos {args.photos} is not a folder with JPEG files.")
        paths *= -(-4 * args.count // len(paths))  # enough for the loader to settle
        sources["photos"] = sources["recipe"] = FileSplit(root, paths, np.zeros(len(paths)))

    report: dict = {"cpu": cpuinfo("model name") or "unknown", "cores": available_cores()}
    report |= {"opencv": cv2.__version__, "numpy": np.__version__, "images_per_second_one_core": {}}
    for work, split in sources.items():
        result = report["images_per_second_one_core"][work] = one_core(work, split, args.count, args.rounds)
        print(work, result, flush=True)
    for (work, split), workers in itertools.product(sources.items(), args.workers):
        steps = max(1, min(4 * args.count, len(split)) // args.batch - workers - 2)
        speed = whole_loader(work, split, workers, steps, args.batch)
        report.setdefault("images_per_second_loader", {}).setdefault(work, {})[str(workers)] = speed
        print(work, f"{workers} workers:", speed, flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
