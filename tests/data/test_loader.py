"""Batches: their order and content whatever the workers, damaged images, and workers that die."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ppattn.cli.export import _real_images
from ppattn.config import make_config
from ppattn.data import EvalLoader, Preprocess, TrainLoader, TrainTransform, build_datasets
from ppattn.data.splits import ArraySplit, FileSplit, Subset
from ppattn.data.transforms import fit
from ppattn.errors import UserError
from scripts.make_shards import write_shards
from tests.helpers.data_sets import batches, config, indices, numbered, plain, same, write_image

ROOT = Path(__file__).resolve().parents[2]


AUGMENT = {"random_resized_crop": {}, "horizontal_flip": 0.5, "color_jitter": [0.2, 0.2, 0.2], "random_erasing": 0.3,
           "rand_augment": "rand-m9-mstd0.5-inc1", "rotation": 5.0}  # fmt: skip


def loader(split, workers=0, rank=0, world=1, augment=None, batch=8, seed=42, accumulate=1):
    settings = config("digits", None, augment, batch_size=batch, num_workers=workers)
    settings.train.seed, settings.train.accumulate = seed, accumulate
    transform = TrainTransform(settings.augment, Preprocess((13, 9), [0.5] * 3, [0.2] * 3)) if augment else plain()
    return TrainLoader(split, 7, transform, settings, rank, world)


def epoch(split, *arguments, epoch=1, start=0, **options):
    """(images, labels) of one epoch of steps of one micro-batch each."""
    return batches(loader(split, *arguments, **options), epoch, start)


def test_content_depends_neither_on_workers_nor_on_the_step_that_is_asked_for_first():
    split = numbered(61)
    whole = epoch(split, augment=AUGMENT)
    assert len(whole) == loader(split).steps_per_epoch == 7
    assert whole[0][0].shape == (8, 3, 13, 9) and whole[0][0].dtype == np.float32
    for workers in (1, 2, 3):
        same(epoch(split, workers, augment=AUGMENT), whole)
    for start in (3, 6, 7):
        same(epoch(split, start=start, augment=AUGMENT), whole[start:])
    same(epoch(split, 2, start=5, augment=AUGMENT), whole[5:])
    assert not np.array_equal(epoch(split, epoch=2, augment=AUGMENT)[0][1], whole[0][1])
    assert not np.array_equal(epoch(split, augment=AUGMENT, seed=43)[0][1], whole[0][1])


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_cross_epochs_and_may_be_asked_for_in_any_order(workers):
    """61 images are 7 micro-batches: steps of 3, 3 and 1."""
    split = numbered(61)
    every = epoch(split, epoch=0) + epoch(split, epoch=1)
    with closing(loader(split, workers, accumulate=3)) as steps:
        assert steps.steps_per_epoch == 3
        for step, numbers in {1: [3, 4, 5], 2: [6], 3: [7, 8, 9], 5: [13], 0: [0, 1, 2]}.items():
            found = list(steps.micro_batches(step))
            assert [batch.number for batch in found] == numbers == list(steps.numbers(step))
            for batch in found:
                assert np.array_equal(batch.images, every[batch.number][0])


def test_a_sample_is_a_function_of_seed_epoch_and_index():
    split = numbered(61)
    settings = make_config({"augment": AUGMENT}).augment
    transform = TrainTransform(settings, Preprocess((13, 9), [0.5] * 3, [0.2] * 3))
    order = np.random.default_rng([42, 1]).permutation(61)
    images, labels = epoch(split, 2, augment=AUGMENT)[3]
    for k, index in enumerate(order[24:32]):
        assert labels[k] == index % 7
        assert np.array_equal(images[k], transform(split.image(index), np.random.default_rng([42, 1, index, 0])))


def test_alternating_flip_turns_each_image_in_every_second_epoch():
    split = numbered(48)  # six full steps
    settings = config("digits", None, {"alternating_flip": True}, batch_size=8)
    tool = TrainTransform(settings.augment, Preprocess((6, 6), (0, 0, 0), (1, 1, 1)))
    turns = []
    for number in range(4):
        turned = np.full(48, -1)
        for images, _ in batches(TrainLoader(split, 7, tool, settings), number):
            for image in np.rint(images.transpose(0, 2, 3, 1) * 255).astype(np.uint8):
                same = [image.tobytes() in (i.tobytes(), i[:, ::-1].tobytes()) for i in split.images]
                index = same.index(True)
                turned[index] = not np.array_equal(image, split.images[index])
        turns.append(turned)
    assert set(turns[0]) == {0, 1} and 10 < turns[0].sum() < 38
    assert all(np.array_equal(turns[k], turns[0] if k % 2 == 0 else 1 - turns[0]) for k in range(4))
    with pytest.raises(UserError, match="goes without augment.horizontal_flip"):
        both = make_config({"augment": {"alternating_flip": True, "horizontal_flip": 0.5}}).augment
        TrainTransform(both, Preprocess(6))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_epochs_have_smaller_images(workers):
    """Two epochs of 7 x 5, then 13 x 9: the small ones are those of a transform made for 7 x 5."""
    split, preprocess = numbered(20), Preprocess((13, 9), [0.5] * 3, [0.2] * 3)
    settings = config("digits", None, {"progressive_resize": {"img_size": [7, 5], "epochs": 2}}, batch_size=8)
    settings.data.num_workers = workers
    tool = TrainLoader(split, 7, TrainTransform(settings.augment, preprocess), settings)
    with closing(tool):
        shapes = [batch.images.shape[2:] for step in range(6) for batch in tool.micro_batches(step)]
        (second,) = tool.micro_batches(3)
    assert shapes == [(7, 5)] * 4 + [(13, 9)] * 2
    small = Preprocess((7, 5), [0.5] * 3, [0.2] * 3)
    indices = split.train_order(42, 1, 0, 1, 1)[8:16, 0]
    wanted = small.assemble([fit(split[i][0], (7, 5), "bicubic") for i in indices])
    assert np.array_equal(second.images, wanted)
    settings.augment.progressive_resize.img_size = 14
    with pytest.raises(UserError, match=r"14 is larger than model.img_size \[13, 9\]"):
        TrainLoader(split, 7, TrainTransform(settings.augment, preprocess), settings)


def test_training_batches_of_all_ranks_make_the_single_process_batch():
    split = numbered(1003)
    single = [indices(images) for images, _ in epoch(split, batch=24)]
    ranks = [[indices(images) for images, _ in epoch(split, rank=r, world=3)] for r in range(3)]
    assert len(single) == 41
    for step, batch in enumerate(single):
        assert sorted(batch) == sorted(sum((rank[step] for rank in ranks), []))
    assert len(set(sum(single, []))) == 984


def test_repeated_augmentation():
    split, world = numbered(50), 3
    rows = {}
    for rank in range(world):
        repeated = loader(split, rank=rank, world=world, augment={"repeats": 3, "horizontal_flip": 0.5}, batch=4)
        assert repeated.steps_per_epoch == 4  # as without repeats
        rows[rank] = repeated.order(1).tolist()
    order = np.random.default_rng([42, 1]).permutation(50)
    dealt = [rows[k % world][k // world] for k in range(world * 16)]
    assert dealt == [[int(order[k // 3]), k % 3] for k in range(48)]  # the copies go to different processes


def test_evaluation_counts_each_of_1003_images_once_over_two_ranks():
    split = numbered(1003)
    preprocess = Preprocess((6, 6), (0, 0, 0), (1, 1, 1))
    for workers in (0, 2):
        seen = []
        for rank in range(2):
            part = EvalLoader(split, preprocess, 64, rank, 2, workers)
            found_in_all = list(part)
            assert len(found_in_all) == len(part)
            for images, labels, found in found_in_all:
                assert indices(images) == found.tolist()
                assert np.array_equal(labels, found % 7)
                seen += found.tolist()
        assert len(seen) == 1003 and sorted(seen) == list(range(1003))
    assert list(EvalLoader(numbered(1), preprocess, 4, rank=1, world=2)) == []


def test_too_few_images_for_a_step():
    with pytest.raises(UserError, match="7 training images do not fill one step of 1 x 8"):
        loader(numbered(7))
    with pytest.raises(UserError, match="accumulate = 8, but an epoch has 7 micro-batches"):
        loader(numbered(61), accumulate=8)


def test_export_is_checked_on_the_images_that_can_be_read(damaged, folder):
    images = _real_images(config("folder", folder), Preprocess(6), "int8")
    assert len(images["images"]) == 8 and len(images["calibration"]) == 13


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_training_image_is_logged_counted_and_replaced_by_the_next(damaged, caplog, workers):
    split = damaged.train
    with caplog.at_level(logging.WARNING, "ppattn.data"), closing(loader(split, workers, batch=15)) as damaged:
        (batch,) = damaged.micro_batches(1)
    order = np.random.default_rng([42, 1]).permutation(15).tolist()
    stand_in = {6: 8, 7: 8}  # bee/1 and bee/2 by bee/3
    expected = np.stack([plain()(split.image(stand_in.get(i, i)), np.random.default_rng(0)) for i in order])
    assert np.array_equal(batch.images, expected)
    assert batch.targets.argmax(axis=1).tolist() == [i // 5 for i in order]
    assert sorted(Path(name).name for name, _ in batch.unreadable) == ["1.png", "2.png", "2.png"]  # bee/2 after bee/1
    assert damaged.unreadable == 3
    assert caplog.text.count("1.png") == 1 and caplog.text.count("2.png") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_evaluation_image_is_logged_and_left_out(damaged, caplog, workers):
    found = np.concatenate([i for _, _, i in EvalLoader(damaged.val, Preprocess(6), 4, num_workers=workers)])
    assert found.tolist() == list(range(8)) and caplog.text.count("cat/2.png") == 1


def test_all_training_images_corrupt(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(b"x")
    split = FileSplit(tmp_path, [f"{i}.png" for i in range(3)], np.zeros(3))
    with pytest.raises(UserError, match="in succession cannot be read"):
        epoch(split, batch=3)


@pytest.mark.parametrize("repeats", [1, 3])
def test_corrupt_image_in_a_shard(tmp_path, repeats, caplog):
    for i in range(12):
        write_image(tmp_path / f"{i}.png", i)
    (tmp_path / "5.png").write_bytes(b"bad")
    write_shards(FileSplit(tmp_path, [f"{i}.png" for i in range(12)], np.arange(12)), tmp_path / "s", "train", 4)
    settings = config("shards", tmp_path / "s", {"repeats": repeats}, val="train-*.tar", batch_size=12)
    split = build_datasets(settings).train
    bad = split.labels.tolist().index(5)
    results = []
    for workers in (0, 2):
        settings.data.num_workers = workers
        with closing(TrainLoader(split, 12, plain(), settings)) as loader:
            results += [batch for step in range(3) for batch in loader.micro_batches(step)]
            times = sum((loader.order(epoch)[:12, 0] == bad).sum() for epoch in range(3))
            assert loader.unreadable == times > 0
    for one, other in zip(results[:3], results[3:], strict=True):
        assert np.array_equal(one.images, other.images)
    assert all(5 not in batch.targets.argmax(axis=1) for batch in results)
    assert sum(len(labels) for _, labels, _ in EvalLoader(split, Preprocess(6), 4)) == 11
    assert "not evaluated: " in caplog.text and "train-00000" in caplog.text


class Deadly(ArraySplit):
    """The worker that reads image 30 is killed, as the kernel does when memory runs out."""

    def image(self, i):
        if i == 30 and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[i]


def test_killed_worker_is_an_error_and_no_hang():
    split = numbered(61)
    split.__class__, split.parent = Deadly, os.getpid()
    with pytest.raises(UserError, match="data.num_workers"):
        epoch(split, 2)
    with pytest.raises(UserError, match="data.num_workers"):  # every verb makes a sentence of it
        list(EvalLoader(split, Preprocess(6), 4, num_workers=2))


class Slow(ArraySplit):
    def image(self, i):
        time.sleep(0.02)
        return self.images[i]


def children(pid):
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs sigtimedwait")
def test_workers_survive_a_clusters_sigterm_and_go_with_their_parent():
    code = (
        "from tests.data import test_loader as t\n"
        "split = t.numbered(600); split.__class__ = t.Slow\n"
        "loader = t.loader(split, 2)\n"
        "for step in range(70): print(*(batch.number for batch in loader.micro_batches(step)), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "0\n"
        workers = children(process.pid)
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
        for step in range(1, 20):
            assert process.stdout.readline() == f"{step}\n"
        assert children(process.pid) == workers
        process.kill()
    while any(map(alive, workers)):
        time.sleep(0.1)


def test_leaving_an_epoch_early_ends_its_workers():
    before = set(children(os.getpid()))
    left = loader(numbered(200), 2)
    next(left.micro_batches(0))
    assert len(set(children(os.getpid())) - before) == 2
    left.close()
    assert not set(children(os.getpid())) - before


def test_both_loaders_put_items_of_like_length_together_and_others_stay_as_they_were():
    split, lengths = numbered(40), np.random.default_rng(1).permutation(np.arange(40))
    settings = config("digits", batch_size=5)
    plain_order = TrainLoader(split, 7, plain(), settings).order(0)
    split.lengths = lengths
    half = Subset(split, np.arange(0, 40, 2))
    assert np.array_equal(half.lengths, lengths[::2])
    sorted_order = TrainLoader(split, 7, plain(), settings).order(0)
    assert sorted(plain_order[:, 0]) == sorted(sorted_order[:, 0]) and not np.array_equal(plain_order, sorted_order)
    assert all(np.ptp(lengths[batch]) == 4 for batch in sorted_order[:, 0].reshape(8, 5))
    seen = [index for _, _, batch in EvalLoader(half, plain().preprocess, 5) for index in batch]
    assert [*half.lengths[seen]] == sorted(half.lengths)
    assert numbered(3).lengths is None and Subset(numbered(3), np.arange(2)).lengths is None
