// scripts/site/formulas.py writes the formulas of docstrings as LaTeX.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".formula"))
    katex.render(element.textContent, element, { displayMode: true, throwOnError: false });
});
