"""Look through a data set: unreadable files, empty classes, the same image in both splits, images per class.

python tools/check.py --data photos
python tools/check.py -c configs/cifar10/deit_nano.yaml
python tools/check.py -c configs/imagenet/inline_deit_tiny.yaml -o data.root=/data/imagenet --json check.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("check", doc=__doc__))
