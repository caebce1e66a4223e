"""Static int8 quantisation of an exported ONNX program, by onnxruntime; a program of its own.

python -m ppattn.deploy.quantise MODEL.onnx IMAGES.npy

Weights (per output channel) and inputs of the linear layers become int8; products between activations, normalisations
and convolutions stay float32, which is where accuracy is lost and little time is spent.
"""

from __future__ import annotations

import os
import sys

import numpy as np

BATCH = 16


def main(path: str, images: str) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    program = onnx.load(path)
    matrices = {array.name for array in program.graph.initializer if len(array.dims) == 2}
    linear = [node.name for node in program.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
    pixels, name = np.load(images), program.graph.input[0].name

    class Batches(CalibrationDataReader):
        batches = iter([{name: pixels[i : i + BATCH]} for i in range(0, len(pixels), BATCH)])

        def get_next(self):
            return next(self.batches, None)

    quantize_static(
        path,
        f"{path}.int8",
        Batches(),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=linear,
    )
    os.replace(f"{path}.int8", path)


if __name__ == "__main__":
    main(*sys.argv[1:])
