"""Tar shards: what is read, in which order, and what happens when it cannot be read."""

import io
import tarfile

import numpy as np
import pytest

from ppattn.data import EvalLoader, Preprocess, TrainLoader, build_datasets
from ppattn.data.shards import ShardSplit, index_shard, named_shards
from ppattn.data.splits import FileSplit
from ppattn.errors import UserError
from scripts.make_shards import write_shards
from tests.helpers.data_sets import batches, config, plain, same, write_image


def test_shards_hold_every_image_byte_for_byte(shards):
    root, images = shards
    splits = build_datasets(config("shards", root))
    assert isinstance(splits.train, ShardSplit) and len(splits.train) == 61 and len(splits.train.names) == 8
    seen = {splits.train.image(i).tobytes(): splits.train.label(i) for i in range(61)}
    assert seen == {image.tobytes(): i % 7 for i, image in enumerate(images)}
    names = []
    for name in splits.train.names:
        with tarfile.open(root / name) as tar:
            names += tar.getnames()
    assert len(names) == 122 and all(name.endswith((".png", ".cls")) for name in names)


def test_the_name_of_a_split_is_a_word_of_the_files_name(tmp_path):
    for name in ("retrieval-train-0.tar", "Retrieval_VAL.1.tar", "latest-train-1.tar", "test000.tar"):
        (tmp_path / name).write_bytes(b"")
    found = {split: [path.name for path in named_shards(tmp_path, split)] for split in ("train", "val", "test")}
    assert found == {
        "train": ["latest-train-1.tar", "retrieval-train-0.tar"],
        "val": ["Retrieval_VAL.1.tar"],
        "test": ["test000.tar"],
    }


def test_an_index_that_cannot_be_written_is_done_without(shards, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    root, _ = shards
    monkeypatch.setattr("ppattn.files.atomic.os.replace", full)
    assert len(build_datasets(config("shards", root)).train) == 61
    assert {path.suffix for path in root.iterdir()} == {".tar"}


def test_shards_before_a_damaged_one_are_indexed_once(shards, monkeypatch):
    root, _ = shards
    whole, last = [], root / "train-000007.tar"
    data = last.read_bytes()
    last.write_bytes(data[:700])
    with pytest.raises(UserError, match="damaged"):
        build_datasets(config("shards", root))
    last.write_bytes(data)
    monkeypatch.setattr("ppattn.data.shards.index_shard", lambda path: whole.append(path.name) or index_shard(path))
    build_datasets(config("shards", root))
    assert [name for name in whole if name.startswith("train")] == ["train-000007.tar"]


def test_foreign_shards_are_indexed_once(shards, monkeypatch):
    root, _ = shards
    known = build_datasets(config("shards", root))
    (root / "shards.json").unlink()
    again = build_datasets(config("shards", root, train="train-{000000..000007}.tar", val="val-*.tar"))
    assert again.train.labels.tolist() == known.train.labels.tolist()
    monkeypatch.setattr("ppattn.data.shards.index_shard", None)  # from now on the index is enough
    assert len(build_datasets(config("shards", root)).train) == 61


def shard_epoch(root, workers=0, epoch=2, start=0, rank=0, world=1, buffer=12, repeats=1):
    settings = config("shards", root, {"repeats": repeats}, batch_size=5, num_workers=workers, shuffle_buffer=buffer)
    return batches(TrainLoader(build_datasets(settings).train, 7, plain(), settings, rank, world), epoch, start)


def test_shards_shuffle_resume_and_split(shards):
    root, images = shards
    whole = shard_epoch(root)
    assert len(whole) == 12
    seen = [image.tobytes() for batch, _ in whole for image in np.rint(batch * 255).astype(np.uint8)]
    known = {image.transpose(2, 0, 1).tobytes(): i for i, image in enumerate(images)}
    order = [known[image] for image in seen]
    assert len(set(order)) == 60
    assert [i % 7 for i in order] == [label for _, labels in whole for label in labels.tolist()]
    same(shard_epoch(root, workers=2), whole)
    for start in (1, 7, 11):
        same(shard_epoch(root, start=start), whole[start:])
    same(shard_epoch(root, workers=3, start=4), whole[4:])
    assert not np.array_equal(shard_epoch(root, epoch=3)[0][1], whole[0][1])
    parts = [shard_epoch(root, rank=rank, world=2) for rank in (0, 1)]
    assert [len(part) for part in parts] == [6, 6]
    both = [image.tobytes() for part in parts for batch, _ in part for image in batch]
    assert len(set(both)) == 60
    twice = [label for _, labels in shard_epoch(root, repeats=2) for label in labels.tolist()]
    assert len(twice) == 60 and twice[::2] == twice[1::2]


def test_shards_keep_their_order_on_disk_up_to_the_buffer(shards):
    """Shards come one after the other, in another order than that of their names; samples move by `buffer` places."""
    root, _ = shards
    split = build_datasets(config("shards", root, shuffle_buffer=4)).train
    order = split.train_order(42, 2, 0, 1, 1)[:, 0]
    assert sorted(order.tolist()) == list(range(61)) and order.tolist() != list(range(61))
    shuffled = np.random.default_rng([42, 2]).permutation(8)
    stream = np.concatenate([np.arange(61)[split.starts[s] : split.starts[s + 1]] for s in shuffled])
    place = {sample: k for k, sample in enumerate(stream.tolist())}
    assert max(abs(place[sample] - k) for k, sample in enumerate(order.tolist())) <= 4


def test_shard_evaluation_counts_each_image_once(shards):
    root, _ = shards
    split = build_datasets(config("shards", root)).val
    seen = []
    for rank in range(3):
        for _, labels, found in EvalLoader(split, Preprocess(6), 4, rank, 3, num_workers=rank):
            assert np.array_equal(labels, split.labels[found])
            seen += found.tolist()
    assert sorted(seen) == list(range(61))


def test_foreign_shards(tmp_path):
    """Folders in the archive, capital letters, files that belong to no sample's image, a key with a second dot."""
    path, image = tmp_path / "train-0.tar", write_image(tmp_path / "0.png", 1)
    files = {"a/0.png": (tmp_path / "0.png").read_bytes(), "a/0.cls": b"3\n", "a/0.json": b"{}", "b/0.seg.png": b"mask"}
    files |= {"b/0.PNG": files["a/0.png"], "b/0.cls": b"1"}
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    split = build_datasets(config("shards", tmp_path, val="train-0.tar")).train
    assert split.labels.tolist() == [3, 1] and all(np.array_equal(split[i][0], image) for i in (0, 1))


def test_shard_mistakes(shards, tmp_path):
    root, _ = shards
    with pytest.raises(UserError, match="No shards"):
        build_datasets(config("shards", tmp_path))
    with pytest.raises(UserError, match="train-000008.tar is missing"):
        build_datasets(config("shards", root, train="train-{000000..000008}.tar"))
    with pytest.raises(UserError, match="already has shards"):
        write_shards(FileSplit(tmp_path / "files", ["0.png"], np.array([0])), root, "train")
    path = root / "train-000003.tar"
    data = path.read_bytes()
    for content in (data[: len(data) // 2], data[:1024], data[:700], b"x" * 3000, b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match="train-000003.tar is damaged"):
            build_datasets(config("shards", root))
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("lonely.png"))  # no .cls beside it
    with pytest.raises(UserError, match="lonely"):
        build_datasets(config("shards", root))


def test_two_shards_joined_by_cat_are_an_error(shards):
    """A reader of tar files ends with the first."""
    root, _ = shards
    first, second = (root / f"train-00000{i}.tar" for i in (0, 1))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(UserError, match=r"train-000000\.tar.*a second archive follows the first"):
        build_datasets(config("shards", root))
