"""What the results of gpu_forms.py say: crossing points with fused softmax, the best local term, and a short table."""

from __future__ import annotations

import math
from typing import Any

RIGHT = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-3}  # relative distances that count as right
MEASURES = ("forward_ms", "both_ms")


def summarise(rows: list[dict]) -> dict[str, Any]:
    """`crossing`: tokens from which a form is faster than fused softmax; `best`: the fastest right form."""
    crossing, best = [], []
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for dtype in dtypes:
        fused = times(rows, "softmax", "sdpa", dtype)
        keys = dict.fromkeys((row["operator"], row["form"]) for row in rows if row["dtype"] == dtype)
        for operator, form in keys:
            if operator in ("softmax", "window", "local", "linear_map") or form == "rounded":
                continue
            found: dict[str, Any] = {"operator": operator, "form": form, "dtype": dtype}
            for measure in MEASURES:
                found[measure] = crossing_point(times(rows, operator, form, dtype)[measure], fused[measure])
            crossing.append(found)
        for operator in dict.fromkeys(operator for operator, _ in keys):
            for tokens in sorted({row["tokens"] for row in rows if row["operator"] == operator}):
                best.append(fastest(rows, operator, dtype, tokens))
    return {"crossing": crossing, "best": best}


def times(rows: list[dict], operator: str, form: str, dtype: str) -> dict[str, dict[int, float]]:
    """Milliseconds per 1,000 tokens by number of tokens, of both measures."""
    chosen = [row for row in rows if (row["operator"], row["form"], row["dtype"]) == (operator, form, dtype)]
    return {
        measure: {
            row["tokens"]: 1e3 * row[measure] / (row["batch"] * row["tokens"]) for row in chosen if row.get(measure)
        }
        for measure in MEASURES
    }


def crossing_point(ours: dict[int, float], fused: dict[int, float]) -> str:
    """Where the ratio of the times becomes 1, on logarithmic axes; "< N" or "> N" outside of what was measured."""
    tokens = sorted(ours.keys() & fused.keys())
    if not tokens:
        return ""
    ratios = [math.log(ours[n] / fused[n]) for n in tokens]
    if ratios[0] <= 0:
        return f"< {tokens[0]}"
    for i in range(1, len(tokens)):
        (n, m), (a, b) = tokens[i - 1 : i + 1], ratios[i - 1 : i + 1]
        if a > 0 >= b:
            return f"{n * (m / n) ** (a / (a - b)):.0f}"
    return f"> {tokens[-1]}"


def right(row: dict) -> bool:
    """Finite and near float64, also for large inputs in the forward direction."""
    limit = RIGHT[row["dtype"]]
    near = all(row.get(key) is not None and row[key] <= limit for key in ("out_fro", "grad_fro", "large_out_fro"))
    return near and bool(row["finite"]) and bool(row["large_finite"])


def fastest(rows: list[dict], operator: str, dtype: str, tokens: int) -> dict[str, Any]:
    """The right form with the least time of forward and backward."""
    chosen = [row for row in rows if (row["operator"], row["dtype"], row["tokens"]) == (operator, dtype, tokens)]
    able = [row for row in chosen if row.get("both_ms") and right(row)]
    found: dict[str, Any] = {"operator": operator, "dtype": dtype, "tokens": tokens}
    for measure in MEASURES:
        first = min(able, key=lambda row: row[measure] / row["batch"], default=None)
        found |= {measure: first and first[measure], f"{measure[:-3]}_form": first and first["form"]}
    return found


def worst(rows: list[dict], key: str) -> str:
    values = [math.inf if row[key] is None else row[key] for row in rows if key in row]
    return f"{max(values):.1e}" if values else "-"


def show(results: dict[str, Any]) -> None:
    """Times and distances in bfloat16, crossing points, the best local terms, programs."""
    rows, summary = results["operators"], results["summary"]
    sizes = sorted({row["tokens"] for row in rows if row["operator"] == "softmax"})
    print(f"\n{results.get('environment')}")
    print(
        f"bfloat16: ms of forward/both at {sizes} tokens | worst distance of output, gradient | beats fused softmax at"
    )
    found = [row for row in summary["crossing"] if row["dtype"] == "bfloat16"]
    crossing = {(row["operator"], row["form"]): f"{row['forward_ms']}, {row['both_ms']}" for row in found}
    half = [row for row in rows if row["dtype"] == "bfloat16" and row["form"] != "rounded"]
    for operator, form in dict.fromkeys((row["operator"], row["form"]) for row in half):
        same = [row for row in half if (row["operator"], row["form"]) == (operator, form)]
        same.sort(key=lambda row: row["tokens"])
        cells = [f"{row['forward_ms']:.3f}/{row['both_ms']:.3f}" if "both_ms" in row else "failed" for row in same]
        beats = crossing.get((operator, form), "")
        print(f"{operator:11} {form:16}", *cells, "|", worst(same, "out_fro"), worst(same, "grad_fro"), "|", beats)
    print("\nlocal term: fastest right form, forward and both")
    for row in summary["best"]:
        if row["operator"] == "local":
            print(*(row[key] for key in ("dtype", "tokens", "forward_form", "forward_ms", "both_form", "both_ms")))
    print("\nprograms: largest difference from the golden output; None: not finite")
    for name in dict.fromkeys(row["program"] for row in results["programs"]):
        same = [row for row in results["programs"] if row["program"] == name]
        print(f"{name:29}", *(f"{row['mode']} {row['difference']}" for row in same))
    print(f"\nskipped: {results['skipped']}\nerrors: {results['errors']}\n{results['seconds']} s")
