"""Small questions about the syntax of Python, for scripts that read the package's code."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or a file, without those of functions and classes inside of it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from inside(child)


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement gives values to, or adds to, with these values."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = list(zip(targets, values, strict=False))
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
            pairs = [(one, ast.Subscript(value, ast.Constant(index))) for index, one in enumerate(targets)]
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            pairs = [(target, value)]
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            pairs = [(target, value)]
        case ast.NamedExpr(target=target, value=value):  # in a condition, after which it is not empty
            pairs = [(target, ast.BoolOp(ast.Or(), [value, ast.Constant("")]))]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            pairs = [(target, value)]
        case ast.Call(func=ast.Attribute(value=target, attr="append" | "extend" | "setdefault"), args=[*_, value]):
            pairs = [(target, value)]
        case _:
            return
    for target, value in pairs:
        if isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id, value


def is_string(node: ast.expr) -> bool:
    """Whether it is a literal, or joins strings."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join")):
            return True
    return False


def last_name(function: ast.expr) -> str:
    """The name by which something is called; empty if it has none."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def words_of(node: ast.AST) -> str:
    """A literal, with ``<name>`` in place of its fields."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    parts = (shown(v.value) if isinstance(v, ast.FormattedValue) else words_of(v) for v in node.values)
    return "".join(parts)


def shown(node: ast.expr) -> str:
    """A value in words: the name of what it is made from."""
    return f"<{_name_of(node)}>"


def _name_of(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[inner]), attr="__name__"):
            return f"class of {_name_of(inner)}"
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            return f"number of {_name_of(inner)}"
        case ast.Call(func=ast.Name(id="divisors"), args=[inner, *_]):
            return f"divisors of {_name_of(inner)}"
        case ast.Subscript(value=ast.Attribute(value=inner, attr="shape")):
            return f"size of {_name_of(inner)}"
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return _name_of(inner)
        case ast.Call(func=ast.Name(id="map" | "max" | "min"), args=[_, inner, *_]):
            return _name_of(inner)
        case ast.Call(func=ast.Name(), args=[inner, *_]) | ast.Call(func=inner):
            return _name_of(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower().removeprefix("get_").replace("_", " ")
        case ast.Subscript(value=inner, slice=ast.Constant()):
            name = _name_of(inner)
            return name if name.endswith(("ses", "ies", "ours")) else name.removesuffix("s")
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.FormattedValue(value=inner):
            return _name_of(inner)
        case ast.NamedExpr(target=inner) | ast.BoolOp(values=[inner, *_]) | ast.IfExp(body=inner):
            return _name_of(inner)
        case ast.GeneratorExp(elt=inner) | ast.ListComp(elt=inner) | ast.JoinedStr(values=[inner, *_]):
            return _name_of(inner)
        case ast.Constant(value=str(words)):
            return words
    return "number"


def filled(words: str, call: ast.Call) -> str:
    """A template with its fields named by what `str.format` is given."""
    for argument in call.args:
        words = words.replace("{}", shown(argument), 1)
    return words
