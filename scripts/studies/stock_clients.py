"""Run exported folders as other people's programs do: their settings, and nothing of ppattn.

python scripts/studies/stock_clients.py paddle|onnxruntime|openvino FOLDER ...  # FOLDER/inputs.npz -> FOLDER/CLIENT.npz
"""

import sys
from pathlib import Path

import numpy as np


def paddle(folder: Path):
    from paddle.inference import Config, create_predictor

    predictor = create_predictor(Config(str(folder / "inference.json"), str(folder / "inference.pdiparams")))
    source = predictor.get_input_handle(predictor.get_input_names()[0])
    target = predictor.get_output_handle(predictor.get_output_names()[0])

    def run(images):
        source.reshape(images.shape)
        source.copy_from_cpu(images)
        predictor.run()
        return target.copy_to_cpu()

    return run


def onnxruntime(folder: Path):
    from onnxruntime import InferenceSession

    session = InferenceSession(str(folder / "inference.onnx"))
    return lambda images: session.run(None, {session.get_inputs()[0].name: images})[0]


def openvino(folder: Path):
    from openvino import Core

    # Without the hint OpenVINO computes in bfloat16 where the processor can.
    model = Core().compile_model(str(folder / "inference.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: model(images)[0]


def main(client: str, *folders: str) -> None:
    for folder in map(Path, folders):
        run = {"paddle": paddle, "onnxruntime": onnxruntime, "openvino": openvino}[client](folder)
        with np.load(folder / "inputs.npz") as inputs:
            np.savez(folder / f"{client}.npz", **{name: run(images) for name, images in inputs.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
