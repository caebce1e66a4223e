"""Every test starts from the same seed, threads and number type."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _runtime():
    import paddle

    import ppattn

    ppattn.setup(device="cpu", seed=0)
    paddle.disable_signal_handler()  # Paddle's hides the Python stack of a crash, which pytest would show


@pytest.fixture(autouse=True)
def _seed(_runtime):
    from ppattn.runtime import seed_all

    seed_all(0)


@pytest.fixture
def float64():
    """Layers and tensors made in this test are float64."""
    import paddle

    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")
