"""Classify images with PaddleX 3.7.2 and an exported folder, in Python or over HTTP.

bash scripts/setup.sh paddlex && source .venv-paddlex/bin/activate
python examples/paddlex/classify.py predict --model exported photo.jpg
python examples/paddlex/classify.py serve --model exported --port 8080
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import yaml

# Without it PaddleX 3.7.2 asks its model hosts at import, and waits where there is no network.
os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")

import paddlex
from paddlex.inference.models.image_classification.processors import Topk
from paddlex.inference.serving.basic_serving import create_pipeline_app, run_server

import ppattn.contrib.paddlex  # noqa: F401 (registers the names of the zoo)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("predict", "serve"))
    parser.add_argument("images", nargs="*", metavar="IMAGE")
    parser.add_argument("--model", required=True, metavar="DIR", help="exported folder")
    parser.add_argument("--engine", choices=("paddle_static", "onnxruntime"), default="paddle_static")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_intermixed_args()
    config = yaml.safe_load((Path(args.model) / "inference.yml").read_text(encoding="utf-8"))
    name = config["Global"]["model_name"]
    if args.verb == "predict":
        model = paddlex.create_model(name, model_dir=args.model, engine=args.engine)
        for result in model.predict(args.images, batch_size=4):
            print(json.dumps(result.json["res"], default=str, ensure_ascii=False))
    else:
        serve(name, args)


def serve(name: str, args: argparse.Namespace) -> None:
    """POST /image-classification with {"image": BASE64, "topk": 5}."""
    # PaddleX 3.7.2 hands numpy numbers to its answer model, which takes int and float only, and answers 500.
    call = Topk.__call__
    Topk.__call__ = lambda self, *given, **settings: plain(call(self, *given, **settings))
    module = {"module_name": "image_classification", "model_name": name, "model_dir": args.model}
    config = {
        "pipeline_name": "image_classification",
        "SubModules": {"ImageClassification": module | {"batch_size": 4, "topk": 5}},
        # PaddleX 3.7.2 draws every answer into a picture, with a font that it downloads.
        "Serving": {"visualize": False},
    }
    pipeline = paddlex.create_pipeline(config=config, engine=args.engine)
    run_server(create_pipeline_app(pipeline, config), host="127.0.0.1", port=args.port)


def plain(found: tuple) -> tuple:
    """(class numbers, scores, names) of numpy as lists of int, float and str."""
    indexes, scores, names = found
    return indexes.tolist(), [row.tolist() for row in scores], names


if __name__ == "__main__":
    main()
