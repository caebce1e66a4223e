"""Tables of results/gpu: forms of the attentions on a GPU, and exported programs in float16."""

import itertools
import math

from ppattn import zoo
from scripts.tables.markdown import table
from scripts.tables.runs import BACKBONES, Results

TOKENS = (196, 784, 3136, 12544)
FORMS = {"plain": "stored map", "sdpa": "fused", "guarded": "guarded", "mixed": "mixed", "naive": "naive"}
OPERATORS = {"softmax": "softmax", "agent": "agent", "linear_elu": "linear", "inline": "inline"}
OPERATORS |= {name: name for name in ("polaformer", "mala", "rala", "soft", "vittt")}
Rows = dict[int, dict[str, str]]  # by tokens


def read_form(results: Results, operator: str, form: str) -> Rows:
    """The rows of one form in bfloat16."""
    wanted = {"operator": operator, "form": form, "dtype": "bfloat16"}
    rows = results.csv("gpu/operators.csv")
    return {int(row["tokens"]): row for row in rows if wanted.items() <= row.items()}


def crossing(ours: Rows, fused: Rows, measure: str) -> str:
    """The number of tokens from which a form is faster than another, interpolated on logarithmic axes."""
    ratios = {n: math.log(float(ours[n][measure]) / float(fused[n][measure])) for n in sorted(ours)}
    sizes = list(ratios)
    if ratios[sizes[-1]] > 0:
        return f"> {sizes[-1]:,}"
    last, m = max(((n, m) for n, m in itertools.pairwise(sizes) if ratios[n] > 0), default=(0, 0))
    if not last:
        return f"< {sizes[0]:,}"
    return rounded(last * (m / last) ** (ratios[last] / (ratios[last] - ratios[m])))


def rounded(number: float) -> str:
    """Two digits."""
    return f"{float(f'{number:.2g}'):,g}"


def gpu_forms_table(results: Results) -> str:
    """bfloat16: milliseconds for 50,176 tokens by tokens per image, gradient error, when faster than fused softmax."""
    fused, body = read_form(results, "softmax", "sdpa"), []
    for operator, name in OPERATORS.items():
        for form, title in FORMS.items():
            if not (rows := read_form(results, operator, form)):
                continue
            times = [f"{float(rows[n][measure]):.2f}" for measure in ("forward_ms", "both_ms") for n in TOKENS]
            errors = [rounded(100 * float(rows[n]["grad_fro"])) for n in TOKENS[::2]]
            faster = [crossing(rows, fused, measure) for measure in ("forward_ms", "both_ms")]
            body.append([f"`{name}`, {title}", *times, *errors, *(faster if operator != "softmax" else ("", ""))])
    sizes = " | ".join(f"{n:,}" for n in TOKENS).split(" | ")
    head = [f"forward, {sizes[0]}", *sizes[1:], f"forward and backward, {sizes[0]}", *sizes[1:]]
    errors = [f"gradient error in %, {sizes[0]}", sizes[2]]
    return table(["attention", *head, *errors, "faster than fused softmax from: forward", "both"], body)


def gpu_programs_table(results: Results) -> str:
    """Largest difference of the logits from float32 and share of images with its first class, by backbone."""
    rows = {row["model"].removesuffix("_cifar10"): row for row in results.csv("gpu/half_programs.csv")}
    columns, body = [(backbone, kind) for backbone in BACKBONES for kind in ("fp16", "naive")], []
    for attention in (name for name in zoo.attentions() if f"{name}_deit_nano" in rows):
        cells = []
        for backbone, kind in columns:
            row = rows.get(f"{attention}_{backbone}")
            cells.append(f"{row[kind]} ({100 * float(row[f'{kind}_same_top1']):.1f} %)" if row else None)
        body.append([f"`{attention}`", *cells])
    return table(["attention", *(f"{BACKBONES[backbone]}, {kind}" for backbone, kind in columns)], body)


def gpu_half_table(results: Results) -> str:
    """Emulated: largest difference of the logits from float32, the worst of three backbones at 64 tokens."""
    found: dict[tuple, list[float]] = {}
    for row in results.csv("gpu/half.csv"):
        finite = row["gradients_finite"] == "True" and math.isfinite(float(row["logits"]))
        key = row["attention"], row["dtype"], row["guarded"] == "True", int(row["tokens"])
        found.setdefault(key, []).append(float(row["logits"]) if finite else math.inf)
    columns = list(itertools.product(("bfloat16", "float16"), (True, False), (64, 196, 4096)))
    body = []
    for name in zoo.attentions():
        worst = [max(found.get((name, *column), [math.nan])) for column in columns]
        cells = [None if math.isnan(x) else "not finite" if math.isinf(x) else f"{x:.1e}" for x in worst]
        body.append([f"`{name}`", *cells])
    titles = [f"{dtype}{'' if guarded else ', no guard'}, {tokens:,}" for dtype, guarded, tokens in columns]
    return table(["attention", *titles], body)
