"""List models, attentions, backbones and configs."""

import fnmatch
import sys
from argparse import Namespace

from ppattn import CONFIGS, zoo
from ppattn.errors import UserError, nearest_name, unknown_name
from ppattn.runtime.plugins import IMPORTED
from ppattn.text import aligned_table

KINDS = ("models", "attentions", "backbones", "configs")
WEIGHTS = {"file": "included", "url": "pretrained", "page": "on a page"}


def run(args: Namespace) -> None:
    if args.kind and args.kind not in KINDS:
        raise unknown_name("kind", args.kind, KINDS)
    print("\n\n".join(_section(kind, args.pattern) for kind in ([args.kind] if args.kind else KINDS)))


def rows(kind: str) -> list[dict[str, str]]:
    """One mapping of column to text per entry of a kind; `name` comes first."""
    if kind == "configs":  # paths as `-c` takes them, and the comment that each file opens with
        files = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "base"]
        named = [(f"configs/{path.relative_to(CONFIGS).as_posix()}", path.read_text("utf-8")) for path in files]
        return [{"name": name, "about": text.split("\n")[0].lstrip("# ")} for name, text in named]
    if kind == "attentions":
        return _attentions()
    return [_facts(zoo.model_entry(name)) for name in (zoo.list_models() if kind == "models" else zoo.list_backbones())]


def _facts(entry) -> dict[str, str]:
    costs = zoo.costs().get(entry.name)
    return {
        "name": entry.name,
        "family": entry.family,
        "params": f"{costs['params'] / 1e6:.1f} M" if costs else "",
        "MACs": f"{costs['macs'] / 1e9:.2f} G" if costs else "",
        "pixels": str(entry.arguments.get("img_size", "")),
        "published top-1": "" if entry.top1 is None else f"{entry.top1:.1f}",
        "source": entry.source,
        "weights": next((said for key, said in WEIGHTS.items() if key in entry.weights), ""),
        "note": entry.note,
    }


def _attentions() -> list[dict[str, str]]:
    """The table of the package, and the user's own attentions with the first line of their module's text."""
    found = [
        {"name": name, "title": facts.title, "published": facts.venue, "arXiv": facts.arxiv, "cost": facts.cost}
        for name, facts in zoo.attentions().items()
    ]
    if IMPORTED:  # and Paddle with them
        from ppattn.attention import ATTENTIONS

        for name in (name for name in ATTENTIONS.list() if name not in zoo.attentions()):
            about = (sys.modules[ATTENTIONS.get(name).__module__].__doc__ or "").strip().split("\n")[0]
            found.append(dict.fromkeys(found[0], "") | {"name": name, "title": about})
    return found


def _section(kind: str, pattern: str | None) -> str:
    entries = rows(kind)
    chosen = [row for row in entries if _matches(row["name"], pattern)]
    if not chosen:
        others = [other for other in KINDS if any(_matches(row["name"], pattern) for row in rows(other))]
        hint = nearest_name(str(pattern).strip("*"), [row["name"] for row in entries])
        hint = f" There are such {' and '.join(others)}: `list {others[0]} {pattern!r}`." if others else hint
        raise UserError(f"None of the {len(entries)} {kind} matches {pattern!r}.{hint}")
    columns = [column for column in chosen[0] if any(row[column] for row in chosen)]
    lines = aligned_table([columns, *([row[column] for column in columns] for row in chosen)])
    return "\n".join([f"{len(chosen)} {kind if len(chosen) > 1 else kind[:-1]}", *lines])


def _matches(name: str, pattern: str | None) -> bool:
    return pattern is None or pattern in name or fnmatch.fnmatch(name, pattern)
