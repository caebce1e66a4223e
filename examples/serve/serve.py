"""An ONNX export behind HTTP, without ppattn: `pip install fastapi uvicorn onnxruntime pillow`, then in this folder
`MODEL=/exported uvicorn serve:app`; ask with `curl --data-binary @photo.jpg http://127.0.0.1:8000/predict`."""

import io
import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from PIL import Image
from preprocess import preprocess

BYTES, Image.MAX_IMAGE_PIXELS = 10 * 2**20, 25_000_000  # Pillow rejects images of twice as many pixels
folder = Path(os.environ["MODEL"])
about = json.loads((folder / "ppattn.json").read_text(encoding="utf-8"))
session = onnxruntime.InferenceSession(folder / "inference.onnx")
app = FastAPI()


def classify(data: bytes) -> list[dict]:
    try:
        images = preprocess(Image.open(io.BytesIO(data)), **about["preprocess"])
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise HTTPException(400, f"Not a readable image: {error}") from None
    (probabilities,) = session.run(None, {"images": images})[0]
    if about["output"] == "logits":
        probabilities = np.exp(probabilities - probabilities.max())
        probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")[:5]
    return [{"name": about["classes"][i], "score": float(probabilities[i])} for i in order]


@app.post("/predict")
async def predict(request: Request) -> list[dict]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BYTES:
            raise HTTPException(413, f"An image has at most {BYTES} bytes.")
    return await run_in_threadpool(classify, data)
