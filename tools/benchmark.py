"""Measure models, attentions or exported folders side by side.

python tools/benchmark.py --models deit_tiny inline_deit_tiny --modes infer train --output runs/benchmark
python tools/benchmark.py --models deit_tiny --attentions softmax inline linear --sizes 224 448 896 --output runs/curves
python tools/benchmark.py --folder exported exported_onnx --output runs/folders
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("benchmark", doc=__doc__))
