"""Export a trained model for inference; it is checked against the trained model first.

python tools/export.py --run runs/digits/inline_deit_nano --output exported
python tools/export.py --run runs/digits/inline_deit_nano --output exported_onnx --format onnx
python tools/export.py -c configs/imagenet/deit_tiny.yaml --weights deit_tiny.safetensors --output deit --precision bf16
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("export", doc=__doc__))
