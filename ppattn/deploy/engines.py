"""The runtimes that an exported folder runs on, and a program that tries them in a process of its own.

python -m ppattn.deploy.engines FOLDER INPUTS.npz OUTPUTS ENGINE ...

A process of its own, because oneDNN's graph passes and paddle2onnx can end the process, or hang, instead of raising.
"""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ppattn.deploy.folder import ONNX, PROGRAM, WEIGHTS, check_operators
from ppattn.errors import optional_package
from ppattn.files.tables import read_table
from ppattn.runtime.cpu import available_cores
from ppattn.runtime.startup import devices, import_paddle

Engine = Callable[[np.ndarray], np.ndarray]  # float32 images [B, C, H, W] -> outputs [B, K]
TABLE = read_table(Path(__file__).with_name("runtimes.yaml"))
CALLS: dict[str, list[list[str]]] = TABLE["calls"]
ONNXRUNTIME = ("onnxruntime", "fp16", "int8")


def open_engine(folder: str | Path, engine: str, threads: int | None = None) -> Engine:
    """A function from images to the program's outputs; threads may share it.

    `engine` is "jit" (paddle.jit.load), one of `CALLS`, one of `ONNXRUNTIME` (the same for programs of other
    precisions), or "openvino_" and a precision. All but OpenVINO use a GPU, see `on_gpu`.
    """
    folder, threads = Path(folder), threads or available_cores()
    if engine in ONNXRUNTIME:
        return _onnxruntime(folder, threads)
    if engine.startswith("openvino"):
        return _openvino(folder, "bf16" if engine == "openvino_bf16" else "f32", threads)
    check_operators(folder / PROGRAM)
    return _paddle(folder, engine, threads)


def on_gpu(engine: str) -> bool:
    """Whether the engine runs on a GPU here: on none that is hidden, or where Paddle was set to the CPU."""
    paddle, hidden = sys.modules.get("paddle"), os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if hidden or (paddle and "gpu" in devices() and paddle.get_device() == "cpu"):
        return False
    if engine in ONNXRUNTIME:
        import onnxruntime

        return "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    return not engine.startswith("openvino") and "gpu" in devices()


def _paddle(folder: Path, engine: str, threads: int) -> Engine:
    paddle = import_paddle()
    from paddle.inference import Config, create_predictor

    if engine == "jit":
        layer = paddle.jit.load(str(folder / Path(PROGRAM).stem))
        layer.eval()
        return lambda images: layer(paddle.to_tensor(images)).numpy()
    config = Config(str(folder / PROGRAM), str(folder / WEIGHTS))
    if on_gpu(engine):
        config.enable_use_gpu(256, int(paddle.get_device().partition(":")[2] or 0))
    else:
        config.set_cpu_math_library_num_threads(threads)
        for name, *arguments in CALLS[engine]:
            getattr(config, name)(*arguments)
    config.disable_glog_info()
    predictor = create_predictor(config)
    source = predictor.get_input_handle(predictor.get_input_names()[0])
    target = predictor.get_output_handle(predictor.get_output_names()[0])
    lock = threading.Lock()

    def run(images: np.ndarray) -> np.ndarray:
        with lock:  # input, run and output are three calls on one object
            source.reshape(images.shape)
            source.copy_from_cpu(np.ascontiguousarray(images, np.float32))
            predictor.run()
            return target.copy_to_cpu()

    return run


def _onnxruntime(folder: Path, threads: int) -> Engine:
    with optional_package("onnx"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    providers = ["CUDAExecutionProvider"] * on_gpu("onnxruntime") + ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(folder / ONNX), options, providers=providers)
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: np.ascontiguousarray(images, np.float32)})[0]


def _openvino(folder: Path, precision: str, threads: int) -> Engine:
    with optional_package("openvino"):
        from openvino import Core
    # Without the first hint OpenVINO computes in bfloat16 wherever the processor can.
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    model, lock = Core().compile_model(str(folder / ONNX), "CPU", hints), threading.Lock()

    def run(images: np.ndarray) -> np.ndarray:
        with lock:  # one request, whose outputs are copied
            return model(np.ascontiguousarray(images, np.float32))[0]

    return run


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop what C++ code prints with `std::cout`, here or in another thread, without touching the file descriptors:
    oneDNN names a check of `mean` there, and no setting turns that off."""
    _set_cout(4)  # std::ios_base::failbit
    try:
        yield
    finally:
        _set_cout(0)


def _set_cout(state: int) -> None:
    """Set the state of `std::cout` of GNU's library; another library prints on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        library = ctypes.CDLL("libstdc++.so.6")
        cout = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
        offset = ctypes.c_size_t.from_address(cout).value - 3 * ctypes.sizeof(ctypes.c_void_p)  # of its virtual base
        base = ctypes.c_void_p(cout + ctypes.c_ssize_t.from_address(offset).value)
        library._ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate(base, state)


def main(folder: str, inputs: str, outputs: str, *engines: str) -> None:
    """Write OUTPUTS/<engine>.npz for one engine after the other; a file is there only when it is complete."""
    with np.load(inputs) as file:
        batches = dict(file)
    for engine in engines:
        run = open_engine(folder, engine)
        part = Path(outputs) / f"part_{engine}.npz"
        np.savez(part, **{name: run(images) for name, images in batches.items()})  # type: ignore[arg-type]
        os.replace(part, Path(outputs) / f"{engine}.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
