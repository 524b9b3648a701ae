"""Prints the size of the project: lines, statements and the pages.

python tests/size.py
"""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("lowprec", "experiments", "analysis")


def main() -> None:
    """Prints lines and statements of product and tests, and the lines and words of the pages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split()
    for name, folders in (("product", PRODUCT), ("tests", ("tests",))):
        texts = [
            (ROOT / file).read_text()
            for file in files
            if file.endswith(".py") and file.split("/")[0] in folders
        ]
        nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        lines = sum(text.count("\n") for text in texts)
        print(f"{name}: {len(texts)} files, {lines} lines, {statements} statements")
    ends = ("CHANGELOG.md", "RESULTS.md", "claims.md")
    pages = [(ROOT / f).read_text() for f in files if f.endswith(".md") and not f.endswith(ends)]
    words = sum(len(page.split()) for page in pages)
    print(f"pages: {len(pages)}, {sum(page.count(chr(10)) for page in pages)} lines, {words} words")


if __name__ == "__main__":
    main()
