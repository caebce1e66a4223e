"""How the parts of the package stand on each other: no circle of imports, and none that runs upward.

python -m tests.test_imports        # parts, imports between them, and the lines of each
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ppattn"

# From the ground up. A part imports what stands in an earlier line, or in its own.
LAYERS = [
    {"errors", "text", "registry"},
    {"files", "validation"},
    {"settings", "ops"},
    {"runtime", "layers"},
    {"cost", "attention", "data"},
    {"backbones"},
    {"weights"},
    {"zoo"},
    {"config", "contrib", "plots", "benchmark"},
    {"analysis", "trained"},
    {"deploy"},
    {"engine"},
    {"linearize"},
    {"cli", "__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def part(name: str) -> str:
    return name.split(".")[1]


def modules() -> dict[str, Path]:
    """Dotted name to file, of every module; not the package itself, which imports its public names when asked."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in sorted(paths.items()) if name != "ppattn.__init__"}


def imports(known: dict[str, Path], name: str) -> set[str]:
    """Modules of the package that a module imports anywhere in its text, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(known[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {inside if inside in known else str(node.module) for inside in inner}
    return found & known.keys() - {name}


MODULES = modules()
GRAPH = {name: imports(MODULES, name) for name in MODULES}
PAIRS = {(part(name), part(other)) for name in GRAPH for other in GRAPH[name] if part(name) != part(other)}


def test_the_map_stays_small():
    assert len({part(name) for name in GRAPH}) <= 30 and len(PAIRS) <= 165
    assert len([*PACKAGE.glob("*.py")]) <= 1 + 13  # with __init__


def test_no_import_runs_upward_or_in_a_circle():
    unknown = {part(name) for name in GRAPH} - LEVEL.keys()
    assert not unknown, f"write down where {sorted(unknown)} stands"
    assert [(one, other) for one, other in sorted(PAIRS) if LEVEL[one] < LEVEL[other]] == []
    TopologicalSorter(GRAPH).prepare()  # raises at a circle


if __name__ == "__main__":
    for own in sorted({part(name) for name in GRAPH}):
        lines = sum(len(path.read_text().splitlines()) for name, path in MODULES.items() if part(name) == own)
        print(f"{own:12}{lines:6} lines, imports {', '.join(sorted(b for a, b in PAIRS if a == own))}")
    print(f"{len(PAIRS)} imports between parts")
