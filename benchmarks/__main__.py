"""Lists the benchmarks, each with the first line of its documentation.

python -m benchmarks
"""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["benchmarks"]


def benchmarks() -> dict[str, str]:
    """The benchmarks by name: the modules of this package that can be run."""
    found: dict[str, str] = {}
    folder = Path(__file__).parent
    for path in sorted((*folder.glob("*.py"), *folder.glob("*/__main__.py"))):
        text = path.read_text()
        if path == Path(__file__) or 'if __name__ == "__main__":' not in text:
            continue
        is_package = path.name == "__main__.py"
        name = path.parent.name if is_package else path.stem
        about = path.with_name("__init__.py").read_text() if is_package else text
        found[name] = (ast.get_docstring(ast.parse(about)) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    for name, about in benchmarks().items():
        print(f"python -m benchmarks.{name}\n    {about}")
