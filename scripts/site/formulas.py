"""The formulas of docstrings as LaTeX: `y_i = phi(q_i) (sum_j phi(k_j)^T v_j) / N` reads well in both forms.

Words: names of Greek letters are letters; other words of several letters are functions where `(`, `_` or `'` follows or
they have capitals, and text otherwise. `K1` is K with the index 1, `q~` has a tilde, `q+` and `q-` a sign on top.
`a / b` with spaces is a fraction, `a/b` is not. `.` is a product, `*` an element-wise one, `<-` an assignment.
"""

from __future__ import annotations

import re

LETTERS = {name: f"\\{name}" for name in ("alpha", "beta", "phi", "pi", "Psi", "Theta")}
LETTERS |= {"eps": r"\epsilon", "inf": r"\infty", "sum": r"\sum"}
SYMBOLS = {
    "<-": r"\leftarrow",
    "->": r"\to",
    "!=": r"\neq",
    "<=": r"\le",
    ">=": r"\ge",
    "||": r"\,\|\,",
    "*": r"\odot",
    ".": r"\cdot",
    ";": r";\quad",
    "...": r"\dots",
}
BREAKS = {"+", "-", "=", ",", ";", "<-", "->", "!=", "<=", ">=", "<", ">", "||"}
CLOSING = {"(": ")", "[": "]", "|": "|", "{": "}"}
TOKEN = re.compile(
    r"""(?P<space>\s+) | (?P<script>[_^](?:-?\d+/\d+|inf|-?[A-Za-z0-9]+|(?=[{(]))) |
    (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?) | (?P<name>[A-Za-z]+(?:-[a-z]{2,}|_[a-z]{3,})*\d*(?:x\d+)?) | 
    (?P<accent>~|'+|[+-](?=[_,\]~.]|\s[=.])) |
    (?P<sign>\.\.\.|<-|->|!=|<=|>=|\|\||.)""",
    re.VERBOSE,
)


def latex(formula: str) -> str:
    """LaTeX of one formula."""
    formula = re.sub(r"\b(\d+)( ?)x\2(?=\d)", r"\1 \\times ", formula)
    return re.sub(r" \} \\text\{ ", " ", _Parser(formula).sequence(""))


class _Parser:
    def __init__(self, formula: str):
        self.tokens = [(m.lastgroup or "", m[0]) for m in TOKEN.finditer(formula)]
        self.place = 0

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ("end", "")

    def sequence(self, closing: str) -> str:
        """Everything up to a closing bracket, which is taken, too."""
        out: list[str] = []
        start = 0  # of the product that a fraction takes as its numerator
        while self.peek()[0] != "end":
            kind, text = self.peek()
            if text == closing and closing:
                self.place += 1
                break
            if kind == "space":
                if self.peek(1)[1] == "/" and self.peek(2)[0] == "space":
                    self.place += 3
                    numerator = " ".join(out[start:])
                    out[start:] = [rf"\frac{{{_bare(numerator)}}}{{{_bare(self.atom())}}}"]
                    continue
                self.place += 1
            elif text == "\\":
                self.place += 2
                out.append(r"\times")
            elif kind == "sign" and text not in "([{|":
                self.place += 1
                out.append(SYMBOLS.get(text, text))
                start = len(out) if text in BREAKS else start
            else:
                out.append(self.atom())
        return " ".join(out)

    def atom(self) -> str:
        """A number, a name with its arguments or a bracket, with indices and exponents."""
        kind, text = self.peek()
        self.place += 1
        if kind == "name":
            found = self.name(text)
        elif text in CLOSING and kind == "sign":
            inner = self.sequence(CLOSING[text])
            tall = re.search(r"\\(frac|sum|sqrt)", inner)
            left, right = {"{": (r"\{", r"\}"), "|": (r"\lvert ", r"\rvert")}.get(text, (text, CLOSING[text]))
            found = rf"\left{left}{inner}\right{right}" if tall else f"{left}{inner}{right}"
        else:
            found = text
        while self.peek()[0] == "script":
            found += self.script()
        return found

    def script(self) -> str:
        text = self.peek()[1]
        self.place += 1
        if len(text) > 1:
            several = text[1:].isalpha() and text[1:] not in LETTERS
            return f"{text[0]}{{{latex(' '.join(text[1:]) if several else text[1:])}}}"
        closing = CLOSING[self.peek()[1]]
        self.place += 1
        return f"{text}{{{self.sequence(closing)}}}"

    def name(self, text: str) -> str:
        signs = accent = ""
        while self.peek()[0] == "accent":
            sign = self.peek()[1]
            self.place += 1
            if sign == "~":
                accent = r"\tilde"
            else:
                signs += "'" if sign.startswith("'") else f"^{{{sign}}}"
        letters, index = (
            re.fullmatch(r"([A-Za-z]+?)(\d*)", text).groups() if re.fullmatch(r"[A-Za-z]+\d*", text) else (text, "")
        )
        following = self.peek()
        if text == "sqrt" and following[1] == "(":
            self.place += 1
            return rf"\sqrt{{{self.sequence(')')}}}"
        if letters in LETTERS or len(letters) == 1:
            found = LETTERS.get(letters, letters)
        elif following[1] == "(" or following[0] == "script" or signs or "_" in text or not letters.islower():
            found, index = rf"\operatorname{{{text.replace('_', chr(92) + '_')}}}", ""
        else:
            return rf"\text{{ {text} }}"
        found = f"{accent}{{{found}}}" if accent else found
        found += (f"_{{{index}}}" if index else "") + signs
        if following[1] == "(":
            found += self.atom()
        return found


def _bare(text: str) -> str:
    """A numerator or denominator without the brackets around all of it."""
    match = re.fullmatch(r"(?:\\left)?\((.*?)(?:\\right)?\)", text)
    if match:
        depth = 0
        for sign in match[1]:
            depth += (sign == "(") - (sign == ")")
            if depth < 0:
                return text
        return match[1]
    return text


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
    return [[_chunk(part) for part in re.split(r"\s{2,}", line)] for line in out]


def _chunk(text: str) -> str:
    """A formula, or the remark beside it: an equation's number, or words only."""
    if re.fullmatch(r"[(\[].*(eq\. |lemma |\d{4}).*[)\]]", text):
        return rf"\text{{{text}}}"
    words = re.findall(r"[A-Za-z-]{2,}", text)
    return rf"\text{{{text}}}" if len(words) > 2 and "=" not in text and "(" not in text else latex(text)
