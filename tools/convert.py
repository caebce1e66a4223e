"""Convert official PyTorch weights to a weights file of this project.

python tools/convert.py --model deit_tiny --from deit_tiny_patch16_224-a1311bcf.pth --output deit_tiny.safetensors
python tools/convert.py --model swin_tiny --from swin_t.pth --output swin_10 --num-classes 10 --allow head
python tools/convert.py --model deit_small --from deit_small.safetensors --output deit_small_384 --img-size 384
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("convert", doc=__doc__))
