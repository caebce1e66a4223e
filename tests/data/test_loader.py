"""Batches: their order and content whatever the workers, damaged images, workers that die, and tar shards."""

import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ppattn.cli.export import _real_images
from ppattn.config import make_config
from ppattn.data import EvalLoader, Preprocess, TrainLoader, TrainTransform, build_datasets
from ppattn.data.shards import ShardSplit, index_shard, named_shards
from ppattn.data.splits import ArraySplit, FileSplit, Subset
from ppattn.data.transforms import resize_image
from ppattn.errors import UserError
from scripts.make_shards import write_shards
from tests.helpers.data_sets import build, build_refused, cifar_archive, config, numbered, write_image

ROOT = Path(__file__).resolve().parents[2]
AUGMENT = {"random_resized_crop": {}, "horizontal_flip": 0.5, "color_jitter": [0.4, 0.4, 0.4, 0.1], "pad_crop": 2,
           "random_erasing": 0.5, "rand_augment": "rand-m9-mstd0.5-inc1", "rotation": 10.0,
           "translate": 0.1}  # fmt: skip
PREPROCESS = Preprocess((13, 9), [0.5] * 3, [0.2] * 3)


def plain():
    """No augmentation and no scaling: 0..255 becomes 0..1."""
    return TrainTransform(make_config({}).augment, Preprocess((6, 6), (0, 0, 0), (1, 1, 1)))


def loader(split, workers=0, rank=0, world=1, augment=None, batch=8, seed=42, accumulate=1, preprocess=PREPROCESS):
    settings = config("digits", None, augment, batch_size=batch, num_workers=workers)
    settings.train.seed, settings.train.accumulate = seed, accumulate
    transform = TrainTransform(settings.augment, preprocess) if augment else plain()
    return TrainLoader(split, 7, transform, settings, rank, world)


def batches(loader, epoch, start=0):
    """(images, labels) of the steps of an epoch from `start` on."""
    steps = range(epoch * loader.steps_per_epoch + start, (epoch + 1) * loader.steps_per_epoch)
    with closing(loader):
        found = [batch for step in steps for batch in loader.micro_batches(step)]
    return [(batch.images, batch.targets.argmax(axis=1)) for batch in found]


def epoch(split, *arguments, epoch=1, start=0, **options):
    """One of steps of one micro-batch each."""
    return batches(loader(split, *arguments, **options), epoch, start)


def same(first, second):
    for one, other in zip(first, second, strict=True):
        assert all(map(np.array_equal, one, other))


def indices(images):
    """Of the images of `numbered`."""
    values = np.rint(images[:, :2, 0, 0] * 255).astype(int)
    return (values[:, 0] + 256 * values[:, 1]).tolist()


def test_content_depends_neither_on_workers_nor_on_the_step_that_is_asked_for_first():
    split, untouched = numbered(61), numbered(61).images
    whole = epoch(split, augment=AUGMENT)
    assert np.array_equal(split.images, untouched) and len(whole) == loader(split).steps_per_epoch == 7
    assert whole[0][0].shape == (8, 3, 13, 9) and whole[0][0].dtype == np.float32
    for workers in (1, 2, 3):
        same(epoch(split, workers, augment=AUGMENT), whole)
    for start in (3, 6, 7):
        same(epoch(split, start=start, augment=AUGMENT), whole[start:])
    same(epoch(split, 2, start=5, augment=AUGMENT), whole[5:])
    assert not np.array_equal(epoch(split, epoch=2, augment=AUGMENT)[0][1], whole[0][1])
    assert not np.array_equal(epoch(split, augment=AUGMENT, seed=43)[0][1], whole[0][1])
    transform = TrainTransform(make_config({"augment": AUGMENT}).augment, PREPROCESS)
    for k, index in enumerate(np.random.default_rng([42, 1]).permutation(61)[24:32]):
        image = transform(split.image(index), np.random.default_rng([42, 1, index, 0]))
        assert np.array_equal(whole[3][0][k], image) and whole[3][1][k] == index % 7


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
            assert all(np.array_equal(batch.images, every[batch.number][0]) for batch in found)
    with pytest.raises(UserError, match="accumulate = 8, but an epoch has 7 micro-batches"):
        loader(split, accumulate=8)


def test_alternating_flip_turns_each_image_in_every_second_epoch():
    split, preprocess = numbered(48), plain().preprocess  # six full steps
    views = [image.tobytes() for image in [*split.images, *split.images[:, :, ::-1]]]
    turns = np.full((4, 48), -1)
    for number in range(4):
        for images, _ in epoch(split, epoch=number, augment={"alternating_flip": True}, preprocess=preprocess):
            for image in np.rint(images.transpose(0, 2, 3, 1) * 255).astype(np.uint8):
                turned, index = divmod(views.index(image.tobytes()), 48)
                turns[number, index] = turned
    assert set(turns[0]) == {0, 1} and 10 < turns[0].sum() < 38
    assert np.array_equal(turns, [turns[0], 1 - turns[0], turns[0], 1 - turns[0]])
    with pytest.raises(UserError, match="goes without augment.horizontal_flip"):
        loader(split, augment={"alternating_flip": True, "horizontal_flip": 0.5})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_epochs_have_smaller_images(workers):
    """Two epochs of 7 x 5, then 13 x 9: the small ones are those of a transform made for 7 x 5."""
    split, resize = numbered(20), {"img_size": [7, 5], "epochs": 2}
    with closing(loader(split, workers, augment={"progressive_resize": resize})) as tool:
        shapes = [batch.images.shape[2:] for step in range(6) for batch in tool.micro_batches(step)]
        (second,) = tool.micro_batches(3)
    assert shapes == [(7, 5)] * 4 + [(13, 9)] * 2
    small = Preprocess((7, 5), [0.5] * 3, [0.2] * 3)
    order = split.train_order(42, 1, 0, 1, 1)[8:16, 0]
    assert np.array_equal(second.images, small.assemble([resize_image(split[i][0], (7, 5), "bicubic") for i in order]))
    with pytest.raises(UserError, match=r"14 is larger than model.img_size \[13, 9\]"):
        loader(split, augment={"progressive_resize": resize | {"img_size": 14}})


def test_training_batches_of_all_ranks_make_the_single_process_batch():
    split = numbered(1003)
    single = [indices(images) for images, _ in epoch(split, batch=24)]
    ranks = [[indices(images) for images, _ in epoch(split, rank=r, world=3)] for r in range(3)]
    assert len(single) == 41
    for step, batch in enumerate(single):
        assert sorted(batch) == sorted(sum((rank[step] for rank in ranks), []))
    assert len(set(sum(single, []))) == 984


def test_repeated_augmentation():
    loaders = [loader(numbered(50), rank=rank, world=3, augment={"repeats": 3}, batch=4) for rank in range(3)]
    assert [repeated.steps_per_epoch for repeated in loaders] == [4] * 3  # as without repeats
    order = np.random.default_rng([42, 1]).permutation(50)
    dealt = [loaders[k % 3].order(1)[k // 3].tolist() for k in range(48)]
    assert dealt == [[int(order[k // 3]), k % 3] for k in range(48)]  # the copies go to different processes


def test_evaluation_counts_each_of_1003_images_once_over_two_ranks():
    split, preprocess = numbered(1003), plain().preprocess
    for workers in (0, 2):
        seen = []
        for rank in range(2):
            part = EvalLoader(split, preprocess, 64, rank, 2, workers)
            found_in_all = list(part)
            assert len(found_in_all) == len(part)
            for images, labels, found in found_in_all:
                assert indices(images) == found.tolist() and np.array_equal(labels, found % 7)
                seen += found.tolist()
        assert sorted(seen) == list(range(1003))
    assert list(EvalLoader(numbered(1), preprocess, 4, rank=1, world=2)) == []


def test_export_is_checked_on_the_images_that_can_be_read(damaged, folder):
    images = _real_images(config("folder", folder), Preprocess(6), "int8")
    assert len(images["images"]) == 8 and len(images["calibration"]) == 13


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_logged_and_in_training_replaced_by_the_next(damaged, caplog, workers):
    found = np.concatenate([i for _, _, i in EvalLoader(damaged.val, Preprocess(6), 4, num_workers=workers)])
    assert found.tolist() == list(range(8)) and caplog.text.count("cat/2.png") == 1
    split = damaged.train
    with caplog.at_level(logging.WARNING, "ppattn.data"), closing(loader(split, workers, batch=15)) as damaged:
        (batch,) = damaged.micro_batches(1)
    order = np.random.default_rng([42, 1]).permutation(15).tolist()  # 6 and 7, bee/1 and bee/2, by bee/3
    expected = np.stack([plain()(split.image({6: 8, 7: 8}.get(i, i)), np.random.default_rng(0)) for i in order])
    assert np.array_equal(batch.images, expected) and batch.targets.argmax(axis=1).tolist() == [i // 5 for i in order]
    assert sorted(Path(name).name for name, _ in batch.unreadable) == ["1.png", "2.png", "2.png"]  # bee/2 after bee/1
    assert damaged.unreadable == 3 and caplog.text.count("bee/1.png") == 1 and caplog.text.count("bee/2.png") == 1


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
    bad, results = split.labels.tolist().index(5), []
    for workers in (0, 2):
        settings.data.num_workers = workers
        with closing(TrainLoader(split, 12, plain(), settings)) as loader:
            results += [batch for step in range(3) for batch in loader.micro_batches(step)]
            assert loader.unreadable == sum((loader.order(epoch)[:12, 0] == bad).sum() for epoch in range(3)) > 0
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
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()]
        assert len(workers) == 2
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGINT)
        assert [process.stdout.readline() for _ in range(1, 20)] == [f"{step}\n" for step in range(1, 20)]
        assert children.read_text().split() == [*map(str, workers)]
        ends = [os.pidfd_open(worker) for worker in workers]
        process.kill()
    for end in ends:
        select.select([end], [], [])


def test_leaving_an_epoch_early_ends_its_workers():
    before, left = set(multiprocessing.active_children()), loader(numbered(200), 2)
    next(left.micro_batches(0))
    assert len(set(multiprocessing.active_children()) - before) == 2
    left.close()
    assert not set(multiprocessing.active_children()) - before


def test_both_loaders_put_items_of_like_length_together_and_others_stay_as_they_were():
    split, lengths = numbered(40), np.random.default_rng(1).permutation(40)
    plain_order = loader(split, batch=5).order(0)
    split.lengths = lengths
    half = Subset(split, np.arange(0, 40, 2))
    assert np.array_equal(half.lengths, lengths[::2])
    sorted_order = loader(split, batch=5).order(0)
    assert sorted(plain_order[:, 0]) == sorted(sorted_order[:, 0]) and not np.array_equal(plain_order, sorted_order)
    assert all(np.ptp(lengths[batch]) == 4 for batch in sorted_order[:, 0].reshape(8, 5))
    seen = [index for _, _, batch in EvalLoader(half, plain().preprocess, 5) for index in batch]
    assert [*half.lengths[seen]] == sorted(half.lengths)
    assert numbered(3).lengths is None and Subset(numbered(3), np.arange(2)).lengths is None


def test_shards_hold_every_image_byte_for_byte(shards):
    root, images = shards
    split = build("shards", root).train
    assert isinstance(split, ShardSplit) and len(split) == 61 and len(split.names) == 8
    seen = {split.image(i).tobytes(): split.label(i) for i in range(61)}
    assert seen == {image.tobytes(): i % 7 for i, image in enumerate(images)}
    with tarfile.open(root / split.names[0]) as tar:
        assert sorted(name[-4:] for name in tar.getnames()) == [".cls"] * 8 + [".png"] * 8


def test_the_name_of_a_split_is_a_word_of_the_files_name(tmp_path):
    for name in ("retrieval-train-0.tar", "Retrieval_VAL.1.tar", "latest-train-1.tar", "test000.tar"):
        (tmp_path / name).write_bytes(b"")
    assert {split: [path.name for path in named_shards(tmp_path, split)] for split in ("train", "val", "test")} == {
        "train": ["latest-train-1.tar", "retrieval-train-0.tar"],
        "val": ["Retrieval_VAL.1.tar"],
        "test": ["test000.tar"],
    }


def test_an_index_that_cannot_be_written_is_done_without(shards, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    root, _ = shards
    monkeypatch.setattr("ppattn.files.atomic.os.replace", full)
    assert len(build("shards", root).train) == 61 and {path.suffix for path in root.iterdir()} == {".tar"}


def test_shards_are_indexed_once(shards, monkeypatch):
    """Those before a damaged one, too, and whatever pattern names them."""
    root, _ = shards
    indexed, last = [], root / "train-000007.tar"
    data = last.read_bytes()
    last.write_bytes(data[:700])
    build_refused("damaged", "shards", root)
    last.write_bytes(data)
    monkeypatch.setattr("ppattn.data.shards.index_shard", lambda path: indexed.append(path.name) or index_shard(path))
    known = build("shards", root).train
    assert [name for name in indexed if name.startswith("train")] == ["train-000007.tar"]
    monkeypatch.setattr("ppattn.data.shards.index_shard", None)  # from now on the index is enough
    again = build("shards", root, train="train-{000000..000007}.tar", val="val-*.tar").train
    assert again.labels.tolist() == known.labels.tolist()


def shard_epoch(root, workers=0, epoch=2, start=0, rank=0, world=1, buffer=12, repeats=1):
    settings = config("shards", root, {"repeats": repeats}, batch_size=5, num_workers=workers, shuffle_buffer=buffer)
    return batches(TrainLoader(build_datasets(settings).train, 7, plain(), settings, rank, world), epoch, start)


def test_shards_shuffle_resume_and_split(shards):
    root, images = shards
    whole = shard_epoch(root)
    assert len(whole) == 12
    seen = [image.tobytes() for batch, _ in whole for image in np.rint(batch * 255).astype(np.uint8)]
    known = {image.transpose(2, 0, 1).tobytes(): i for i, image in enumerate(images)}
    assert len(set(seen)) == 60
    assert [known[image] % 7 for image in seen] == [label for _, labels in whole for label in labels.tolist()]
    same(shard_epoch(root, workers=2), whole)
    for start in (1, 7, 11):
        same(shard_epoch(root, start=start), whole[start:])
    same(shard_epoch(root, workers=3, start=4), whole[4:])
    assert not np.array_equal(shard_epoch(root, epoch=3)[0][1], whole[0][1])
    parts = [shard_epoch(root, rank=rank, world=2) for rank in (0, 1)]
    assert [len(part) for part in parts] == [6, 6]
    assert len({image.tobytes() for part in parts for batch, _ in part for image in batch}) == 60
    twice = [label for _, labels in shard_epoch(root, repeats=2) for label in labels.tolist()]
    assert len(twice) == 60 and twice[::2] == twice[1::2]


def test_shards_keep_their_order_on_disk_up_to_the_buffer(shards):
    """Shards come one after the other, in another order than that of their names; samples move by `buffer` places."""
    root, _ = shards
    split = build("shards", root, shuffle_buffer=4).train
    order = split.train_order(42, 2, 0, 1, 1)[:, 0]
    assert sorted(order.tolist()) == list(range(61)) and order.tolist() != list(range(61))
    shuffled = np.random.default_rng([42, 2]).permutation(8)
    stream = np.concatenate([np.arange(61)[split.starts[s] : split.starts[s + 1]] for s in shuffled])
    place = {sample: k for k, sample in enumerate(stream.tolist())}
    assert max(abs(place[sample] - k) for k, sample in enumerate(order.tolist())) <= 4


def test_foreign_shards(tmp_path):
    """Folders in the archive, capital letters, files that belong to no sample's image, a key with a second dot."""
    path, image = tmp_path / "train-0.tar", write_image(tmp_path / "0.png", 1)
    files = {"a/0.png": (tmp_path / "0.png").read_bytes(), "a/0.cls": b"3\n", "a/0.json": b"{}", "b/0.seg.png": b"mask"}
    files |= {"b/0.PNG": files["a/0.png"], "b/0.cls": b"1"}
    cifar_archive(path, files, "inside", "w")
    split = build("shards", tmp_path, val="train-0.tar").train
    assert split.labels.tolist() == [3, 1] and all(np.array_equal(split[i][0], image) for i in (0, 1))


def test_shard_mistakes(shards, tmp_path):
    root, _ = shards
    build_refused("No shards", "shards", tmp_path)
    build_refused("train-000008.tar is missing", "shards", root, train="train-{000000..000008}.tar")
    with pytest.raises(UserError, match="already has shards"):
        write_shards(FileSplit(tmp_path / "files", ["0.png"], np.array([0])), root, "train")
    path = root / "train-000003.tar"
    data = path.read_bytes()
    for content in (data[: len(data) // 2], data[:1024], data[:700], b"x" * 3000, b""):
        path.write_bytes(content)
        build_refused("train-000003.tar is damaged", "shards", root)
    cifar_archive(path, {"lonely.png": b""}, mode="w")  # no .cls beside it
    build_refused("lonely", "shards", root)
    path.write_bytes(data + data)  # joined by cat: a reader of tar files ends with the first
    build_refused(r"train-000003\.tar.*a second archive follows the first", "shards", root)
