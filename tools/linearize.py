"""Replace the attention of a trained model by a cheaper one.

python tools/linearize.py --model softmax_deit_nano_cifar10 --to inline --output runs/linearize/inline
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("linearize", doc=__doc__))
