"""The formulas of docstrings as LaTeX: `y_i = phi(q_i) (sum_j phi(k_j)^T v_j) / N` reads well in both forms.

Words: names of Greek letters are letters; other words of several letters are functions where `(`, `_` or `'` follows or
they have capitals, and text otherwise. `K1` is K with the index 1, `q~` has a tilde, `k^` a hat, `q+` and `q-` a sign
on top. `a / b` with spaces is a fraction, `a/b` is not. `.` is a product, `*` an element-wise one, `<-` an assignment.
"""

import re

LETTERS = {name: f"\\{name}" for name in ("alpha", "beta", "phi", "pi", "Psi", "Theta")}
LETTERS |= {"eps": r"\epsilon", "inf": r"\infty", "sum": r"\sum"}
SIGNS = {"<-": r"\leftarrow", "!=": r"\neq", "*": r"\odot", ".": r"\cdot{}", ";": r";\quad"}
OPENING, CLOSING = "([{⟨", ")]}⟩"
SIZED = {"(": r"\left(", "[": r"\left[", "⟨": r"\left|", ")": r"\right)", "]": r"\right]", "⟩": r"\right|"}
ACCENTS = {"~": r"\tilde", "^": r"\hat"}
TOKEN = re.compile(
    r"""(?P<sign><-|!=|\*|;|\.(?!\d)) | (?P<script>[_^](?:-?\d+/\d+|inf|-?[A-Za-z0-9]+)) | \\[a-z]+ |
    (?P<name>[A-Za-z]+(?:-[a-z]{2,}|_[a-z]{3,})*)(?P<index>\d*)
    (?P<accents>(?:~|'|\^(?=[\s)])|[+-](?=[_,\]~.]|\s[=.]))*)(?=(?P<next>.?))""",
    re.VERBOSE,
)


def latex(formula: str) -> str:
    """LaTeX of one formula."""
    formula = re.sub(r"\|([^|]+)\|", r"⟨\1⟩", formula)
    formula = re.sub(r"\b(\d+)( ?)x\2(?=\d)", r"\1 \\times ", formula)
    formula = re.sub(r"([_^])\(([^()]*)\)", r"\1{\2}", formula)
    while (place := formula.find("sqrt(")) >= 0:
        end = closing(formula, place + 4)
        formula = rf"{formula[:place]}\sqrt{{{formula[place + 5 : end - 1]}}}{formula[end:]}"
    while (place := formula.find(" / ")) >= 0:
        start, end = product_before(formula, place), factor_after(formula, place + 3)
        above, below = bare(formula[start:place]), bare(formula[place + 3 : end])
        formula = rf"{formula[:start]}\frac{{{above}}}{{{below}}}{formula[end:]}"
    formula = re.sub(r" \} \\text\{ ", " ", TOKEN.sub(token, formula))
    return re.sub(r"[()\[\]⟨⟩]", lambda bracket: SIZED[bracket[0]], formula)


def closing(text: str, place: int) -> int:
    """The place behind the bracket that closes the one at `place`."""
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] in OPENING) - (text[end] in CLOSING)
        if depth == 0:
            return end + 1
    return len(text)


def product_before(text: str, place: int) -> int:
    """Where the product that ends at `place` begins: behind the sign of a sum, a comma, or the bracket around it."""
    depth = 0
    for start in range(place, 0, -1):
        sign = text[start - 1]
        depth += (sign in CLOSING) - (sign in OPENING)
        operator = sign in "=,;" or (sign in "+-" and text[:start].endswith((" +", " -", "<-", "(-", "{-")))
        if depth < 0 or (depth == 0 and (operator or start == 1 and sign == "-")):
            return start + (text[start] == " ")
    return 0


def factor_after(text: str, place: int) -> int:
    while place < len(text) and text[place] not in " ,;" + CLOSING:
        place = closing(text, place) if text[place] in OPENING else place + 1
    return place


def bare(text: str) -> str:
    """A numerator or denominator without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") and closing(text, 0) == len(text) else text


def token(match: re.Match) -> str:
    if sign := match["sign"]:
        return SIGNS[sign]
    if script := match["script"]:
        several = script[1:].isalpha() and script[1:] not in LETTERS
        return f"{script[0]}{{{' '.join(script[1:]) if several else LETTERS.get(script[1:], script[1:])}}}"
    if not (name := match["name"]):
        return match[0]
    index, accents = match["index"], match["accents"]
    if name in LETTERS or len(name) == 1:
        found = LETTERS.get(name, name)
    elif match["next"] in ("(", "_", "^") or accents or "_" in name or not name.islower():
        found, index = rf"\operatorname{{{name}{index}}}".replace("_", r"\_"), ""
    else:
        return rf"\text{{ {name}{index} }}"
    for accent in filter(ACCENTS.get, accents):
        found = f"{ACCENTS[accent]}{{{found}}}"
    signs = re.sub(r"[+-]", r"^{\g<0>}", re.sub(r"[~^]", "", accents))
    return found + (f"_{{{index}}}" if index else "") + signs


def rows(block: str) -> list[list[str]]:
    """LaTeX of an indented block: a row per line, cut where the line has wide gaps.

    A line that is indented further than the first continues the one before.
    """
    out: list[str] = []
    margin = len(block) - len(block.lstrip())
    for line in filter(str.strip, block.splitlines()):
        if out and line[margin].isspace():
            out[-1] += " " + line.strip()
        else:
            out.append(line.strip())
    return [[part_of(part) for part in re.split(r"\s{2,}", line)] for line in out]


def part_of(text: str) -> str:
    """A formula, or the remark beside it: an equation's number, or words only."""
    if re.fullmatch(r"[(\[].*(eq\. |lemma |\d{4}).*[)\]]", text):
        return rf"\text{{{text}}}"
    words = re.findall(r"[A-Za-z-]{2,}", text)
    return rf"\text{{{text}}}" if len(words) > 2 and "=" not in text and "(" not in text else latex(text)
