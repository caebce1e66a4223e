#!/usr/bin/env bash
# From nothing to a model that reads handwritten digits: set up, train, evaluate, export, predict. Again, it reuses all of it.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" packages
run=runs/digits/inline_deit_nano

python tools/train.py -c configs/digits/inline_deit_nano.yaml --resume auto
python tools/eval.py --run "$run"
python tools/export.py --run "$run" --output "$run/export"
python - "$run/pictures" <<'PY'
import sys
from pathlib import Path

import cv2

from ppattn.config import Config
from ppattn.data import build_datasets

digits = build_datasets(Config()).val
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
for i in range(8):
    picture = cv2.resize(digits.image(i), (64, 64), interpolation=cv2.INTER_NEAREST)
    cv2.imwrite(str(folder / f"test_{i}_is_a_{digits.label(i)}.png"), picture)
PY
python tools/predict.py --model "$run/export" "$run/pictures"
python - "$run" <<'PY'
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
top1 = json.loads((run / "eval/metrics.json").read_text())["top1"]
print(f"\nTest accuracy {100 * top1:.1f} % (best epoch) on 360 digits that were not trained on.")
print(f"  learning curves   {run}/curves.png")
print(f"  confusion matrix  {run}/eval/confusion_matrix.png")
print(f"  predictions       {run}/eval/predictions.png")
print(f"  digits as files   {run}/pictures/")
print(f"  exported model    {run}/export/")
sys.exit(0 if top1 >= 0.95 else "error: the accuracy is below 95 %; please report this with the log in " + str(run / "log.txt"))
PY
