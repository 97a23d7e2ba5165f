"""No class has more than 15 methods or 10 attributes."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_METHODS, MAX_ATTRIBUTES = 15, 10


def methods_of(node: ast.ClassDef) -> int:
    """Return the number of methods of a class, properties included."""
    return sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)


def attributes_of(node: ast.ClassDef) -> int:
    """Return the number of attributes that a class declares or its methods set on self.

    Fields of a dataclass do not count, only attributes that its methods set.
    """
    is_record = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    names = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not is_record:
            names.add(ast.unparse(each.target))
        elif isinstance(each, ast.Assign):
            names |= {ast.unparse(target) for target in each.targets}
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and ast.unparse(each.value) == "self"
        ):
            names.add(each.attr)
    return len(names)


def oversized(source: str) -> dict[str, tuple[int, int]]:
    """Return the classes in a source that are too large, with (methods, attributes)."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    sizes = {node.name: (methods_of(node), attributes_of(node)) for node in classes}
    return {
        name: (methods, attributes)
        for name, (methods, attributes) in sizes.items()
        if methods > MAX_METHODS or attributes > MAX_ATTRIBUTES
    }


def test_no_class_is_oversized() -> None:
    sizes_by_class: dict[str, tuple[int, int]] = {}
    for package in ("offload", "parallel", "decoding", "bench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, sizes in oversized(path.read_text()).items():
                sizes_by_class[f"{module}.{name}"] = sizes
    assert not sizes_by_class


def test_oversized_classes_are_detected() -> None:
    methods = "\n".join(f"    def m{number}(self): pass" for number in range(16))
    fields = "\n".join(f"    f{number}: int" for number in range(11))
    inside = "; ".join(f"self.a{number} = 0" for number in range(11))
    assert oversized(f"class A:\n{methods}") == {"A": (16, 0)}
    assert oversized(f"class A:\n{fields}") == {"A": (0, 11)}
    assert oversized(f"@dataclass(frozen=True)\nclass A:\n{fields}") == {}
    assert oversized(f"class A:\n    def f(self):\n        {inside}") == {"A": (1, 11)}
