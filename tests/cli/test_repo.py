"""The repository as a newcomer finds it: tools that answer at once, configs that load, one set of requirements."""

import fnmatch
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ppattn
from ppattn.cli import VERBS
from ppattn.config import load_config
from ppattn.zoo.table import model_entries

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Runs a tool in this interpreter and says afterwards which packages it has imported.
QUIET_RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
# Packages that take longer to import than `--help` should take to answer.
SLOW = {"paddle", "matplotlib", "sklearn", "scipy", "onnx", "onnxruntime", "openvino", "visualdl", "pandas", "requests"}
ARRAYS = {"numpy", "cv2", "PIL"}


def run_tool(*argv: str) -> tuple[str, set[str]]:
    """What a tool prints, and the packages it imports: its work, which other work on the machine does not stretch."""
    process = subprocess.run([sys.executable, "-c", QUIET_RUN, *argv], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout, set(process.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_help_answers_without_importing_much(tool):
    shown, imported = run_tool(str(tool), "--help")
    assert f"ppattn {tool.stem}" in shown
    assert f"python tools/{tool.name}" in shown, "the docstring shows how to call it"
    assert not imported & (SLOW if tool.stem == "benchmark" else SLOW | ARRAYS)


def test_list_shows_everything_without_importing_much():
    text, imported = run_tool("tools/list.py")
    assert '"""' not in text and not imported & (SLOW | ARRAYS)
    shown = {line.split()[0] for line in text.splitlines() if line}
    assert {*ppattn.list_models(), *ppattn.list_backbones(), *ppattn.list_attentions()} <= shown
    assert {str(p.relative_to(ROOT)) for p in CONFIGS if p.parent.name != "base"} <= shown


def test_list_filters_by_pattern_and_by_part_of_a_name():
    for pattern in ("inline_pvt_*", "inline_pvt"):
        text, _ = run_tool("tools/list.py", "models", pattern)
        names = [line.split()[0] for line in text.splitlines()[2:]]
        assert names == [f"inline_pvt_{size}" for size in ("tiny", "small", "medium", "large")]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_config_loads_and_says_what_it_is(path):
    config, origins = load_config(path)
    assert origins, "sets something"
    if path.parent.name != "base":
        text = path.read_text()
        assert re.match(r"# .*\S", text), "opens with a comment: command, hardware, time and result"
        assert f"tools/train.py -c {path.relative_to(ROOT)}" in text and config.output.startswith("runs/")


def test_dependencies_are_listed_once():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert [line.replace("-gpu", "") for line in extras["gpu"]] == extras["cpu"]
    for path in ROOT.glob("requirements*.txt"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith(("#", "--extra-index"))]
        (named,) = [re.fullmatch(r"-e \.\[([\w,]+)\]", line)[1].split(",") for line in lines]
        assert set(named) <= extras.keys()


def test_package_lists_every_folder():
    found = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "ppattn").rglob("__init__.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found | {"ppattn.configs"}


def test_the_wheel_takes_every_file_that_is_no_module():
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, found in data.items() for pattern in found]
    for path in (ROOT / "ppattn").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            name = path.relative_to(ROOT).as_posix()
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_every_verb_has_a_tool_and_the_readme_shows_verbs_that_exist():
    assert {path.stem for path in TOOLS} == set(VERBS)
    verbs = set(re.findall(r"^ppattn (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert {"train", "eval", "export", "predict"} <= verbs <= set(VERBS)


def test_published_accuracies_are_those_of_the_zoo():
    section = (ROOT / "docs/guide/models.md").read_text()
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    seen = set()
    for _, families, _, sizes, *_ in rows:
        names = [name for pattern in re.findall(r"`(\w+_\*)`", families) for name in ppattn.list_models(pattern)]
        entries = [model_entries()[name] for name in names]
        names = {entry.name: entry.top1 for entry in entries if f"`{entry.family}_*`" in families and entry.top1}
        assert names and set(re.findall(r"\b\d\d\.\d\b", sizes)) == {f"{top1:.1f}" for top1 in names.values()}
        seen |= set(names)
    assert {name for name in ppattn.list_models() if model_entries()[name].top1 is not None} == seen


def test_hub_entries_are_the_zoo():
    import paddle

    assert set(paddle.hub.list(str(ROOT), source="local")) == set(ppattn.list_models())
    model = paddle.hub.load(str(ROOT), "inline_deit_tiny", source="local", num_classes=5, img_size=32)
    assert model(paddle.zeros([2, 3, 32, 32])).shape == [2, 5]
    assert "inline_deit_tiny" in paddle.hub.help(str(ROOT), "inline_deit_tiny", source="local")


@pytest.mark.slow
def test_the_example_of_an_added_attention_passes_the_contract(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/guide/extend.md").read_text(), flags=re.DOTALL)[1]
    shutil.copytree(ROOT / "ppattn", tmp_path / "ppattn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "configs/base").mkdir(parents=True)
    (tmp_path / "ppattn/attention/mean.py").write_text(textwrap.dedent(code))
    shutil.copytree(ROOT / "tests/helpers", tmp_path / "tests/helpers")
    for name in ("tests/__init__.py", "tests/conftest.py", "tests/test_contract.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_contract.py", "-k", "mean"]
    process = subprocess.run([*command, "-m", "not slow"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", process.stdout)[1]) >= 7
