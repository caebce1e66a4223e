"""Fixtures of the suite; and the example is known in its own tests only, since others count what the package has."""

from pathlib import Path

import pytest

from ppattn import config, zoo
from ppattn.backbones import BACKBONES
from ppattn.data.sources import DATA_SETS
from ppattn.runtime.plugins import IMPORTED, import_modules
from tests.conftest import _abridged, _equal_start, _runtime, float64  # noqa: F401

import_modules(["examples.lra"], Path(__file__).resolve().parents[3])
TABLES = (
    (BACKBONES._entries, ["sequence"]),
    (zoo.model_entries(), ["sequence"]),
    (DATA_SETS._entries, ["listops", "lra_image", "lra_text", "lra_retrieval"]),
    (IMPORTED, ["examples.lra"]),
)
OWN = [(table, {name: table.pop(name) for name in names}) for table, names in TABLES]


@pytest.fixture(scope="module", autouse=True)
def _known():
    for table, own in OWN:
        table.update(own)
    yield
    for table, own in OWN:
        for name in own:
            del table[name]
    config._with_backbone.cache_clear()
