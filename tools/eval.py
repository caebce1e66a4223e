"""Evaluate a run, a weights file or an exported model on its validation images.

python tools/eval.py --run runs/digits/inline_deit_nano
python tools/eval.py -c configs/cifar10/deit_nano.yaml --weights best.safetensors -o data.root=DIR
python tools/eval.py --model runs/digits/inline_deit_nano/export
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("eval", doc=__doc__))
