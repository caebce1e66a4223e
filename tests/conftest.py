"""Every test starts from the same seed, number type and form of the operators."""

import os

import numpy as np
import pytest
from hypothesis import settings

from tests.helpers.abridged import abridged, whole
from tests.helpers.data_sets import config, write_image

# The suite tries the same cases every time; scripts/fuzz.sh tries new and many more ones.
settings.register_profile("suite", derandomize=True, max_examples=60, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None)
settings.load_profile("suite")


LONGEST = ("test_other_device.py", "test_distributed.py", "test_contract.py", "test_export.py", "test_trust.py")


def pytest_collection_modifyitems(items):
    """Files that take minutes come first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def _runtime():
    import paddle

    import ppattn

    ppattn.setup(device=os.environ.get("PPATTN_TEST_DEVICE", "cpu"), seed=0)
    paddle.disable_signal_handler()  # Paddle's hides the Python stack of a crash, which pytest would show


@pytest.fixture(autouse=True)
def _equal_start(_runtime):
    """Every test has the same seed; one that switches the kernels or the number type leaves them as they were."""
    import paddle

    from ppattn import ops
    from ppattn.runtime.startup import seed_all

    seed_all(0)
    before = ops.dispatch._kernels
    yield
    paddle.set_default_dtype("float32")
    if ops.dispatch._kernels != before:
        ops.enable(before)


@pytest.fixture(scope="session", autouse=True)
def _abridged(_runtime):
    with abridged():
        yield


@pytest.fixture
def unabridged():
    with whole():
        yield


@pytest.fixture
def float64():
    """Layers and tensors made in this test are float64."""
    import paddle

    paddle.set_default_dtype("float64")


@pytest.fixture
def refused(capsys):
    """Runs a verb that ends with exit code 2 and returns what it says."""
    from ppattn.cli import main

    def run(*call) -> str:
        capsys.readouterr()
        assert main([*map(str, call)]) == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def folder(tmp_path):
    """train/{ant,bee,cat} and val/{ant,bee,cat} with 5 and 3 PNG images each, of odd sizes."""
    root = tmp_path / "photos"
    for part, count in (("train", 5), ("val", 3)):
        for c, name in enumerate(("ant", "bee", "cat")):
            for i in range(count):
                write_image(root / part / name / f"{i}.png", [part == "val", c, i], (11 + i, 9 + c, 3))
    return root


@pytest.fixture
def damaged(folder):
    """The splits of `folder` with two training images and one for validation that cannot be read."""
    from ppattn.data import build_datasets

    (folder / "train" / "bee" / "1.png").write_bytes(b"no image")
    (folder / "train" / "bee" / "2.png").write_bytes(b"")
    (folder / "val" / "cat" / "2.png").write_text("nothing")
    return build_datasets(config("folder", folder))


@pytest.fixture
def shards(tmp_path):
    """61 images in shards of 8 (the last has 5), image i's shard order known; as a split and its images by name."""
    from ppattn.data.splits import FileSplit
    from scripts.make_shards import write_shards

    root = tmp_path / "files"
    images = [write_image(root / f"{i}.png", i, (6, 6, 3)) for i in range(61)]
    split = FileSplit(root, [f"{i}.png" for i in range(61)], np.arange(61) % 7)
    for part in ("train", "val"):
        write_shards(split, tmp_path / "shards", part, per_shard=8, seed=part == "val")
    return tmp_path / "shards", images
