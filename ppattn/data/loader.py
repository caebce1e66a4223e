"""Batches of images, each a pure function of its number in the run; the number of workers changes nothing."""

import itertools
import logging
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np

from ppattn.data.images import ImageError, Preprocess
from ppattn.data.mix import mix, smooth_targets
from ppattn.data.splits import Split
from ppattn.data.transforms import TrainTransform
from ppattn.data.workers import stream
from ppattn.errors import UserError
from ppattn.settings import Config
from ppattn.text import printable

logger = logging.getLogger("ppattn.data")


class Batch(NamedTuple):
    number: int  # in the whole run
    images: np.ndarray  # float32 [b, c, h, w], mixed; or what else the transform's `assemble` makes
    targets: np.ndarray  # float32 [b, K], smoothed and mixed
    unreadable: list[tuple[str, str]]  # name and reason of the images that were replaced


class TrainLoader:
    """The micro-batches of a training by step, for process `rank` of `world`.

    The order of an epoch is a permutation of the split, dealt to the processes in turn and cut to full micro-batches;
    all processes together see the same global batches as one process with `world` times the batch size. With
    `augment.repeats` above 1 every image comes that many times in succession, its copies dealt to different processes,
    and the epoch keeps its length. Shards are dealt in equal stretches; items with lengths are sorted into batches,
    which are drawn at random. An image that cannot be read is logged and replaced by the next one of the split.
    """

    def __init__(
        self, split: Split, classes: int, transform: TrainTransform, config: Config, rank: int = 0, world: int = 1
    ):
        self.split, self.classes, self.transform, self.config = split, classes, transform, config
        self.seed, self.rank, self.world, self.size = config.train.seed, rank, world, config.data.batch_size
        self.per_epoch, self.left_out = divmod(len(split), self.size * world)  # images that fill no micro-batch of all
        if self.per_epoch == 0:
            step = f"one step of {world} x {self.size}"
            raise UserError(f"{len(split)} training images do not fill {step}; set data.batch_size lower.")
        if config.data.sampler == "balanced" and (split.table is not None or config.data.name == "shards"):
            raise UserError("data.sampler = balanced needs one label per image, and no shards.")
        self.accumulate = config.train.accumulate
        if self.accumulate > self.per_epoch:
            raise UserError(f"train.accumulate = {self.accumulate}, but an epoch has {self.per_epoch} micro-batches.")
        self.steps_per_epoch = -(-self.per_epoch // self.accumulate)  # the last step may have fewer micro-batches
        # With `alternating_flip`, images flipped in epoch 1, 3, ...: airbench (arXiv 2404.00498, section 3.6).
        self.flip_first = np.random.default_rng(self.seed).integers(0, 2, len(split))
        self.resized, self.resized_until = transform, 0
        if resize := config.augment.progressive_resize:
            self.resized, self.resized_until = transform.resized(resize.img_size), resize.epochs * self.per_epoch
        self.unreadable, self.waited = 0, 0.0  # images, and seconds, since the caller has set them to 0
        self.reported: set[str] = set()
        self.next, self.epoch = -1, -1
        self.stream: Generator | None = None

    def numbers(self, step: int) -> range:
        """Numbers in the run of the micro-batches of a step."""
        epoch, step = divmod(step, self.steps_per_epoch)
        first = step * self.accumulate
        last = min(first + self.accumulate, self.per_epoch)
        return range(epoch * self.per_epoch + first, epoch * self.per_epoch + last)

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of a step. Consecutive steps are prefetched; any jump restarts the workers."""
        for number in self.numbers(step):
            if number != self.next:
                self.close()
                shape = (self.size, *self.transform.slot)
                workers = self.config.data.num_workers
                self.stream = stream(self._make, self._finish, itertools.count(number), shape, workers)
            began = time.perf_counter()
            batch, self.next = next(self.stream), number + 1  # type: ignore[arg-type]
            self.waited += time.perf_counter() - began
            self.unreadable += len(batch.unreadable)
            for name, reason in batch.unreadable:
                if name not in self.reported:
                    logger.warning("skipped in training: %s", printable(reason))
                    self.reported.add(name)
            yield batch

    def transform_of(self, number: int) -> TrainTransform:
        """The transform of a micro-batch; see `augment.progressive_resize`."""
        return self.resized if number < self.resized_until else self.transform

    def close(self) -> None:
        """End the workers."""
        if self.stream:
            self.stream.close()
        self.stream = None

    def order(self, epoch: int) -> np.ndarray:
        """[n, 2]: index and copy of the images of an epoch, in order."""
        if epoch != self.epoch:
            repeats = self.config.augment.repeats
            if self.config.data.sampler == "balanced":
                drawn = balanced_order(self.split.labels, np.random.default_rng([self.seed, epoch]))
                order = np.repeat(drawn, repeats, axis=0) * [1, repeats]
                order[:, 1] += np.tile(np.arange(repeats), len(drawn))
                order = order[self.rank :: self.world]
            else:
                order = self.split.train_order(self.seed, epoch, self.rank, self.world, repeats)
            if self.split.lengths is not None:
                order = by_length(order, self.split.lengths, self.size, np.random.default_rng([self.seed, epoch, 1]))
            self.epoch, self.indices = epoch, order
        return self.indices

    def _make(self, number: int, pixels: np.ndarray) -> tuple:
        epoch, batch = divmod(number, self.per_epoch)
        order = self.order(epoch)[batch * self.size : (batch + 1) * self.size]
        transform = self.transform_of(number)
        inside = tuple(map(slice, transform.slot))
        labels, erased, failures = np.empty(self.size, np.int64), [], []
        for k, (index, copy) in enumerate(order.tolist()):
            rng = np.random.default_rng([self.seed, epoch, index, copy])  # all that is random about this image
            for _ in range(100):
                try:
                    image, labels[k] = self.split[index]
                    break
                except ImageError as error:
                    failures.append((self.split.name(index), str(error)))
                    index = (index + 1) % len(self.split)
            else:
                raise UserError(f"100 images in succession cannot be read, the last one: {failures[-1][1]}")
            flipped = self.config.augment.alternating_flip and (self.flip_first[index] + epoch) % 2 == 1
            pixels[k][inside], box = transform.pixels(image, rng, flipped)
            erased.append(box)
        return labels, erased, failures

    def _finish(self, number: int, pixels: np.ndarray, made: tuple) -> Batch:
        labels, erased, failures = made
        images = self.transform_of(number).assemble(pixels, erased)
        rng = np.random.default_rng([self.seed, *divmod(number, self.per_epoch), self.rank, 1])  # of the whole batch
        targets = smooth_targets(labels, self.classes, self.config.loss.label_smoothing, self.split.table)
        return Batch(number, images, mix(images, targets, self.config.augment, rng), failures)


def balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[n, 2]: as many images of every class, in random order, beside how often each came before."""
    groups, rows = [np.flatnonzero(labels == label) for label in np.unique(labels)], []
    shares = np.full(len(groups), len(labels) // len(groups))
    shares[rng.permutation(len(groups))[: len(labels) % len(groups)]] += 1
    for group, share in zip(groups, shares.tolist(), strict=True):
        turns = -(-share // len(group))
        every = np.concatenate([rng.permutation(group) for _ in range(turns)])
        rows.append(np.stack([every, np.repeat(np.arange(turns), len(group))], axis=1)[:share])
    return rng.permutation(np.concatenate(rows))


def by_length(order: np.ndarray, lengths: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The same full batches' worth of indices [n, 2], so that a batch holds neighbours in length, batches at random."""
    order = order[: len(order) // size * size]
    order = order[np.argsort(lengths[order[:, 0]], kind="stable")].reshape(-1, size, 2)
    return rng.permutation(order).reshape(-1, 2)


class EvalLoader:
    """Every image once over all processes, none twice: (float32 [b, c, h, w], int64 labels [b], int64 indices [b]).

    The last batch may be smaller, and the shares of the processes differ by at most one image. An image that cannot
    be read is logged and left out of its batch, which can then be empty, for the caller to count as wrong.
    """

    def __init__(
        self, split: Split, preprocess: Preprocess, batch_size: int, rank: int = 0, world: int = 1, num_workers: int = 0
    ):
        self.split, self.preprocess = split, preprocess
        self.order = np.arange(rank, len(split), world)
        if split.lengths is not None:
            self.order = self.order[np.argsort(split.lengths[self.order], kind="stable")]
        self.batch, self.workers = min(batch_size, max(1, len(self.order))), num_workers

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        return stream(self._make, self._finish, range(len(self)), (self.batch, *self.preprocess.slot), self.workers)

    def _make(self, number: int, pixels: np.ndarray) -> tuple:
        read, labels, failures = list[int](), list[int](), list[str]()
        for index in self.order[number * self.batch : (number + 1) * self.batch].tolist():
            try:
                image, label = self.split[index]
            except ImageError as error:
                failures.append(str(error))
                continue
            pixels[len(read)] = self.preprocess.pixels(image)
            read.append(index)
            labels.append(label)
        return np.array(labels, np.int64), np.array(read, np.int64), failures

    def _finish(self, number: int, pixels: np.ndarray, made: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        labels, indices, failures = made
        for reason in failures:
            logger.error("not evaluated: %s", printable(reason))
        return self.preprocess.assemble(pixels[: len(indices)]), labels, indices
