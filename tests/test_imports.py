"""How the parts of the package stand on each other: no circle of imports, and none that runs upward.

python -m tests.test_imports        # parts, imports between them, and the lines of each
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

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


def modules(package: Path) -> dict[str, Path]:
    """Dotted name to file, of every module of a package."""
    paths = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in sorted(paths.items())}


def imports(known: dict[str, Path], name: str) -> set[str]:
    """Modules of the package that a module imports anywhere in its text, inside functions too.

    The package itself counts where it is imported as a whole (`import ppattn`), which gives its public names.
    """
    found = set()
    for node in ast.walk(ast.parse(known[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {inside if inside in known else str(node.module) for inside in inner}
    return found & known.keys() - {name}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that reach themselves."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    return sorted(name for name in graph if name in reached(name))


def graph_of(package: Path) -> dict[str, set[str]]:
    known = modules(package)
    return {name: imports(known, name) for name in known}


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a part that stands higher, as sentences."""
    wrong = []
    for name, found in graph.items():
        for other in sorted(found):
            if "." in name and "." in other and LEVEL[name.split(".")[1]] < LEVEL[other.split(".")[1]]:
                wrong.append(f"{name} imports {other}")
    return wrong


def between(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Pairs of parts of which one imports the other."""
    pairs = {(name.split(".")[1], other.split(".")[1]) for name in graph for other in graph[name] if "." in other}
    return {(one, other) for one, other in pairs if one != other}


def test_the_map_stays_small():
    package = ROOT / "ppattn"
    graph = graph_of(package)
    del graph["ppattn"]
    parts = {name.split(".")[1] for name in graph}
    assert len(parts) <= 30 and len(between(graph)) <= 165
    assert len([*package.glob("*.py")]) <= 1 + 13  # with __init__


def test_every_part_has_a_level():
    parts = {name.split(".")[1] for name in modules(ROOT / "ppattn") if "." in name}
    assert parts <= LEVEL.keys(), f"write down where {sorted(parts - LEVEL.keys())} stands"


def test_there_is_no_circle():
    graph = graph_of(ROOT / "ppattn")
    graph["ppattn"] = set()  # its public names are imported when they are asked for, and tell nothing about order
    assert circles(graph) == []


def test_no_import_runs_upward():
    assert upward(graph_of(ROOT / "ppattn")) == []


if __name__ == "__main__":
    known = modules(ROOT / "ppattn")
    graph = graph_of(ROOT / "ppattn")
    del graph["ppattn"]
    pairs = between(graph)
    for part in sorted({name.split(".")[1] for name in graph}):
        lines = sum(len(known[name].read_text().splitlines()) for name in graph if name.split(".")[1] == part)
        print(f"{part:12}{lines:6} lines, imports {', '.join(sorted(b for a, b in pairs if a == part))}")
    print(f"{len(pairs)} imports between parts")
