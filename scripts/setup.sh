#!/usr/bin/env bash
# Makes .venv/ with all that ppattn needs; a second run reuses it. `bash scripts/setup.sh test` adds the test tools;
# `seg`, `det` or `paddlex` makes .venv-seg/, .venv-det/ or .venv-paddlex/ with PaddleSeg, PaddleDetection or PaddleX,
# `docs` .venv-docs/ with MkDocs.
# PPATTN_PADDLE=cpu, cu118, cu126, cu129 or cu130 names the build of Paddle instead of asking the driver.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv example='' wheel=''
case "${1:-}" in
    seg) venv=.venv-seg example=examples/segmentation wheel=paddleseg==2.8.0 ;;
    det) venv=.venv-det example=examples/detection wheel=paddledet==2.6.0 ;;
    paddlex) venv=.venv-paddlex example=examples/paddlex ;;
    docs) venv=.venv-docs example=docs ;;
esac

build=${PPATTN_PADDLE:-}
why="PPATTN_PADDLE says so"
if [ -z "$build" ] && smi=$(nvidia-smi 2>/dev/null); then
    cuda=$(sed -n 's/.*CUDA[A-Za-z ]*: *\([0-9]*\)\.\([0-9]\).*/\1\2/p' <<<"$smi" | head -n 1)
    build=cu118
    [ "${cuda:-0}" -ge 124 ] && build=cu126
    [ "${cuda:-0}" -ge 129 ] && build=cu129
    why="an NVIDIA driver answers (not tried on a GPU yet; PPATTN_PADDLE=cpu installs the CPU build)"
elif [ -z "$build" ]; then
    build=cpu
    why="no NVIDIA driver answers to nvidia-smi"
fi
echo "Paddle build: $build, because $why."

usable='import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
if ! $venv/bin/python -c "import pip; $usable" 2>/dev/null || [ "$(cat $venv/build 2>/dev/null || echo "$build")" != "$build" ]; then
    for python in python3 python3.13 python3.12 python3.11 python3.10 none; do
        "$python" -c "$usable" 2>/dev/null && break
    done
    if [ "$python" = none ]; then
        echo "ppattn needs Python 3.10, 3.11, 3.12 or 3.13; python3 here is $(python3 --version 2>&1 || true)." >&2
        exit 2
    fi
    echo "Creating $venv with $("$python" --version)."
    "$python" -m venv --clear $venv
fi
echo "$build" >$venv/build
if [ "$build" = cpu ]; then
    cp requirements-cpu.txt $venv/requirements.txt
else
    sed "s#/cu126/\$#/$build/#" requirements.txt >$venv/requirements.txt
fi
if [ -n "$example" ]; then
    cat "$example/requirements.txt" >>$venv/requirements.txt
fi

need() { # what, then pip's arguments: installs unless the same files were installed before
    local key
    key=$(cat pyproject.toml $venv/requirements.txt | cksum)
    [ "$(cat "$venv/$1" 2>/dev/null)" = "$key" ] && return
    echo "Installing $1 into $venv (downloads may take minutes):"
    $venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "${@:2}" |
        sed -nE '/^ *(Downloading|Building|Installing|Successfully)/s/^ */  /p'
    echo "$key" >"$venv/$1"
}
need packages -r $venv/requirements.txt
if [ "${1:-}" = test ]; then
    need test-tools -r $venv/requirements.txt -r requirements-test.txt
elif [ -n "$example" ]; then
    [ -z "$wheel" ] || need "$wheel" --no-deps "$wheel"
    echo "Ready: source $venv/bin/activate"
fi
if ! $venv/bin/python -c 'import cv2' 2>/dev/null; then
    echo "OpenCV's window libraries (libGL, libglib) are missing here: installing its build without windows instead."
    version=$($venv/bin/python -c 'import importlib.metadata as m; print(m.version("opencv-python"))')
    $venv/bin/python -m pip uninstall -qq -y opencv-python
    $venv/bin/python -m pip install -qq --disable-pip-version-check --force-reinstall --no-deps \
        "opencv-python-headless==$version"
fi
export PATH="$PWD/$venv/bin:$PATH"
