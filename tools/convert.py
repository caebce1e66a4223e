"""Convert the authors' weights to a file of ours, which `weights:` in a config and `--weights` take.

python tools/convert.py --model inline_deit_tiny --from inline_deit_t.pth --output weights/inline_deit_tiny
python tools/convert.py --model swin_tiny --from swin_tiny_22k.pth --output weights/swin_tiny --allow head
python tools/convert.py --model deit_small --from deit_small.pth --output weights/deit_small_384 --img-size 384
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("convert", doc=__doc__))
