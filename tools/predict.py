"""Predict images, folders and glob patterns with an exported model or a run.

python tools/predict.py --model exported photo.jpg
python tools/predict.py --model exported photos/ 'more/*.png' --topk 3 --csv predictions.csv
python tools/predict.py --run runs/digits/inline_deit_nano runs/digits/inline_deit_nano/pictures --json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppattn.cli import main

if __name__ == "__main__":
    sys.exit(main("predict", doc=__doc__))
