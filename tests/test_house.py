"""The house: what each part of the library may import, and how large a module and a class may be.

Read from the source, so that imports for type checkers and imports inside functions count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hf_paged"
MODULES = sorted(ROOT.rglob("*.py"))
MOST_LINES, MOST_METHODS = 450, 25

# Each package or module may import itself and what is named here, which stands above it.
MAY_IMPORT = {
    "arguments": "",
    "core": "",
    "backends": "core",
    "edit": "core",
    "serialization": "core",
    "prefix": "arguments core serialization",
    "batching": "arguments core",
    "pool": "arguments batching core prefix",
    "view": "backends core",
    "mask": "core view",
    "attention": "backends core mask view",
    "layers": "core edit view",
    "report": "backends core view",
    "base_cache": "arguments backends core layers view",
    "prefill": "arguments base_cache",
    "compiled": "attention layers",
    "cache": "arguments backends base_cache compiled core edit layers pool prefill prefix report "
    "serialization",
    "stopping": "arguments cache",
    "integrations": "cache core pool prefill",
    "__init__": "attention batching cache core pool report stopping",
}


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The modules of the library that a module imports, as names below hf_paged."""
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "hf_paged" for alias in node.names)
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
        below = ROOT.joinpath(*filter(None, base))
        for alias in node.names:
            found = [*filter(None, base)]
            if below.is_dir() and (
                (below / f"{alias.name}.py").exists() or (below / alias.name).is_dir()
            ):
                found.append(alias.name)
            elif below.is_dir():
                found.append("__init__")
            yield ".".join(found), node


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_part_imports_only_what_stands_below_it(path: Path) -> None:
    own = name(path).split(".")[0]
    allowed = {own, *MAY_IMPORT[own].split()}
    used = {other.split(".")[0] for other, _ in imports(path)}
    assert used <= allowed, f"{own} imports {used - allowed}"


def test_the_table_has_one_order() -> None:
    """What a part may import stands above it in the table, and all of it is used."""
    order = list(MAY_IMPORT)
    assert set(order) == {name(path).split(".")[0] for path in MODULES}
    for own, others in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(own) for other in others.split()), own
        used = {
            other.split(".")[0]
            for path in MODULES
            if name(path).split(".")[0] == own
            for other, _ in imports(path)
        }
        assert used - {own} == set(others.split()), own


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name(path): {other for other, _ in imports(path)} for path in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_import_is_inside_a_function(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {
        id(node)
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert not inside


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_modules_and_classes_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            assert len(methods) <= MOST_METHODS, node.name
