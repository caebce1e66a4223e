"""List what there is to build and to train.

python tools/list.py
python tools/list.py models 'inline_*'
python tools/list.py configs cifar10
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("list", doc=__doc__))
