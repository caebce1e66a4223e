"""Builds and loads the C++ kernels of the folder `native`.

The library is compiled on first use (up to two minutes) into `~/.cache/ppattn`, or where other users may write to that
into `private_folder`. Its name is a hash of the source files, the compiler and its flags, the processor and Paddle's
libraries, so that any change triggers a new build. It needs Linux, a C++17 compiler and a Paddle build with MKL; if one
is missing, `load` says which, and the plain forms stay in use.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import paddle

from ppattn.errors import UserError
from ppattn.files.atomic import replacing
from ppattn.files.cache import cache_folder, locked, only_ours, private_folder

SOURCES = sorted(path for path in Path(__file__).with_name("native").iterdir() if path.suffix in (".h", ".cc"))
# Associative sums may be reordered so that loops vectorise; NaN and infinity keep their meaning.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
FLAGS += ["-D_GLIBCXX_USE_CXX11_ABI=1", "-Wall", "-Wextra"]
_loaded = False


class Unavailable(Exception):
    """The native kernels cannot be used; the message says why."""


def load() -> None:
    """Registers the compiled operators with Paddle, built unless they are in the cache; may raise `Unavailable`."""
    global _loaded
    if _loaded:
        return
    try:
        from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op

        _ = paddle._C_ops._run_custom_op
    except (ImportError, AttributeError):  # both are private
        raise Unavailable(f"Paddle {paddle.__version__} registers operators in another way") from None
    root = Path(paddle.__file__).parent
    libraries = [root / "libs" / "libmklml_intel.so", root / "libs" / "libiomp5.so", root / "base" / "libpaddle.so"]
    if platform.system() != "Linux" or not all(path.exists() for path in libraries):
        raise Unavailable("this build of Paddle comes without MKL for Linux")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise Unavailable("there is no C++ compiler (c++, g++ or clang++)")
    try:
        with tempfile.TemporaryDirectory(prefix="ppattn-") as scratch:
            library = _build(_folder() or Path(scratch), scratch, compiler, root / "include", libraries)
            load_op_meta_info_and_register_op(str(library))
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), "no message")
        raise Unavailable(f"{compiler} fails: {reason}") from error
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"the kernels cannot be built or loaded ({error})") from error
    _loaded = True


def _folder() -> Path | None:
    """The cache, or else the private folder in /tmp: the first that this user, and nobody else, can write to."""
    for choice in (cache_folder, private_folder):
        with suppress(UserError, OSError):
            folder = choice().resolve()
            if only_ours(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def _build(folder: Path, scratch: str, compiler: str, include: Path, libraries: list[Path]) -> Path:
    """Path of the compiled library; if several processes start at once, one compiles and the others wait."""

    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, check=True, text=True, cwd=scratch).stdout

    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    flags = [*FLAGS, *os.environ.get("CXXFLAGS", "").split()]
    sources = [(path.name, path.read_text()) for path in SOURCES]
    identity = [sources, run(compiler, "--version"), flags, processor, libraries, paddle.version.commit]
    path = folder / f"native-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    if path.exists():  # a download may hold the lock for long
        return path
    with locked(folder):
        if not path.exists():
            source = next(str(path) for path in SOURCES if path.suffix == ".cc")
            headers = ["-isystem", str(include), "-isystem", str(include / "third_party")]
            print("Compiling the CPU kernels, once: up to two minutes.", file=sys.stderr, flush=True)
            run(compiler, *flags, *headers, "-c", source, "-o", "it.o")
            # Linked separately: -fopenmp would add a second OpenMP runtime beside Paddle's.
            places = [f"-Wl,-rpath,{library.parent}" for library in libraries[1:]]
            run(compiler, "-shared", "it.o", "-o", "it.so", *map(str, libraries), *places)
            with replacing(path, sync=True) as part:
                shutil.copyfile(Path(scratch, "it.so"), part)
    return path
