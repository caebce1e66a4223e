"""Train a model from a YAML file.

python tools/train.py -c configs/digits/inline_deit_nano.yaml
python tools/train.py -c configs/cifar10/deit_nano.yaml -o data.root=cifar-10-python.tar.gz --resume auto
PADDLE_DISTRI_BACKEND=gloo python -m paddle.distributed.launch --nproc_per_node 2 tools/train.py -c CONFIG
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("train", doc=__doc__))
