"""Exported folders: written and checked, then run by Paddle Inference, ONNX Runtime or OpenVINO."""
