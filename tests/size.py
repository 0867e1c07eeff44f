"""Size of the package, printed by ``make size``: lines, code lines, functions and comments, by subpackage and in all.

Code lines exclude blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gruppo"
COLUMNS = ("lines", "code", "files", "functions", "comments")


def measure(path: Path) -> tuple[Counter[str], list[str]]:
    """Counts of one file, and the names of its classes."""
    text = path.read_text(encoding="utf-8")
    tree, strings = ast.parse(text), set[int]()
    functions, classes = 0, []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.ClassDef):
            classes.append(node.name)
    with path.open("rb") as file:
        comments = sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))
    lines = text.splitlines()
    code = sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in enumerate(lines, 1)
    )
    counts = Counter(lines=len(lines), code=code, files=1, functions=functions, comments=comments)
    return counts, classes


def main(root: Path) -> None:
    parts: dict[str, Counter[str]] = {}
    classes: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        part = "/".join(inside[: min(len(inside) - 1, 2)]) or "."
        counts, names = measure(path)
        parts[part] = parts.get(part, Counter()) + counts
        classes.update(names)
    total = sum(parts.values(), Counter())
    width = max(map(len, parts)) + 2
    print(
        " " * width + "".join(f"{name:>11}" for name in COLUMNS) + "   functions/100   comments/100"
    )
    for part, counts in [*sorted(parts.items()), ("total", total)]:
        ratios = (100 * counts[name] / max(counts["code"], 1) for name in ("functions", "comments"))
        row = "".join(f"{counts[name]:>11}" for name in COLUMNS)
        print(f"{part:<{width}}{row}" + "".join(f"{ratio:>16.1f}" for ratio in ratios))
    twice = sorted(name for name, count in classes.items() if count > 1)
    print(f"class names used more than once: {', '.join(twice) or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
