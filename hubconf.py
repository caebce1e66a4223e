"""Entry points of `paddle.hub`: the models of `ppattn.list_models()` by name.

paddle.hub.load("path/to/this/folder", "inline_deit_tiny", source="local", num_classes=10)
"""

import ppattn as _ppattn

dependencies = ["paddle", "numpy", "safetensors"]


def _entry(name):
    def create(**options):
        return _ppattn.create_model(name, **options)

    create.__doc__ = f"{name}: takes the options of `ppattn.create_model` (num_classes, img_size, weights, ...)."
    return create


globals().update({name: _entry(name) for name in _ppattn.list_models()})
