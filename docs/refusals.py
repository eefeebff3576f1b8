"""Find every refusal of the package in its code: the text of each error, with ``<name>`` where a value stands.

A refusal is what is raised as an error or given to `check` or `refuse`, what a function called ``..._violations``
returns, and what is added to a variable of that name. A text is followed from there back to where it is written:
through variables, lists, constants, and functions of the package with their arguments. What is put together in ways
that are not followed is named in `limits.toml`, and :meth:`Code.texts_in` takes it as it is; a test compares all that
is found with all sentences in the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from syntax import assigned, filled, inside, is_string, last_name, shown, words_of

PACKAGE = Path(__file__).resolve().parent.parent / "lightning_parallel"
SINKS = ("check", "refuse", "_refuse", "ConfigurationError")
"""Functions that raise what they are given."""
PASSING = ("list", "tuple", "sorted", "filter")
"""Functions that return what they are given."""
MOST_ALTERNATIVES = 5
"""Texts that a field of an f-string may stand for; one with more is shown by its name."""
LEAST = 4
"""Words of a sentence; what is shorter are names and parts."""
_SENTENCE = 3
"""Words of a field that are shown as they are."""

Values = dict[str, list[ast.expr]]


@dataclass(frozen=True)
class Text:
    """One text in the code.

    Args:
        words: With ``<name>`` for each value that is put in.
        source: Where it is written, as ``folder/file:Class.function``, or ``folder/file:CONSTANT``.
        line: The line in that file.
        parts: The literals in it, by file and line.
    """

    words: str
    source: str
    line: int
    parts: frozenset[tuple[str, int, int]] = frozenset()


@dataclass(frozen=True, eq=False)
class Place:
    """A function at work: its code, and the arguments of the call that led here.

    Args:
        file: The file, without its ending, relative to the package.
        path: The names of the classes and functions around it, itself last.
        nodes: Their code.
        arguments: Parameter -> the argument, and the place of the call.
        calls: The functions and variables that led here, which ends circles.
    """

    file: str
    path: tuple[str, ...] = ()
    nodes: tuple[ast.AST, ...] = ()
    arguments: Mapping[str, tuple[ast.expr, Place]] = field(default_factory=dict)
    calls: tuple[object, ...] = ()

    @property
    def source(self) -> str:
        """How `limits.toml` names it."""
        return f"{self.file}:{'.'.join(self.path)}"


@dataclass(frozen=True, eq=False)
class Definition:
    """A function of the package, and where it stands."""

    node: ast.FunctionDef
    place: Place


class Tree:
    """The files of the package, read and not run.

    Args:
        package: Its folder.
    """

    def __init__(self, package: Path) -> None:
        self.trees = {
            path.relative_to(package).with_suffix("").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(package.rglob("*.py"))
        }
        self._values: dict[ast.AST, Values] = {}

    @cached_property
    def functions(self) -> list[Definition]:
        """All functions and methods, also those inside of others."""
        return [
            Definition(node, place)
            for file, tree in self.trees.items()
            for node, place in self.walk(tree, Place(file))
            if isinstance(node, ast.FunctionDef) and place.nodes[-1] is node
        ]

    def walk(self, node: ast.AST, place: Place) -> Iterator[tuple[ast.AST, Place]]:
        """Each node below, with the function that it is in; a function with itself."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = Place(place.file, (*place.path, node.name), (*place.nodes, node))
        yield node, place
        for child in ast.iter_child_nodes(node):
            yield from self.walk(child, place)

    @cached_property
    def constants(self) -> dict[str, Values]:
        """File -> what it assigns outside of functions."""
        return {file: self.values_in(tree) for file, tree in self.trees.items()}

    @cached_property
    def imports(self) -> dict[str, dict[str, tuple[str, str]]]:
        """File -> each name that it imports from another file of the package -> that file, and the name there."""
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for file, tree in self.trees.items():
            found[file] = {
                alias.asname or alias.name: ("/".join(node.module.split(".")[1:]), alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_parallel")
                for alias in node.names
                if node.module
            }
        return found

    def values_in(self, scope: ast.AST) -> Values:
        """Name -> what is assigned or added to it in a function or a file, not in functions inside of it."""
        if scope in self._values:
            return self._values[scope]
        found: Values = {}
        for node in inside(scope):
            for target, value in assigned(node):
                found.setdefault(target, []).append(value)
        self._values[scope] = found
        return found

    @cached_property
    def by_name(self) -> dict[str, list[Definition]]:
        """Name -> the functions of this name."""
        found: dict[str, list[Definition]] = {}
        for definition in self.functions:
            found.setdefault(definition.node.name, []).append(definition)
        return found

    @cached_property
    def written(self) -> dict[str, list[tuple[ast.expr, Place]]]:
        """Function or constant -> the literals in it."""
        found: dict[str, list[tuple[ast.expr, Place]]] = {}
        for file, tree in self.trees.items():
            for node, place in self._literals(tree, Place(file)):
                found.setdefault(place.source, []).append((node, place))
        return found

    def _literals(self, node: ast.AST, place: Place) -> Iterator[tuple[ast.expr, Place]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = Place(place.file, (*place.path, node.name), (*place.nodes, node))
        elif not place.path and (names := [target for target, _ in assigned(node)]):
            place = Place(place.file, (names[0],))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node, place
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                yield from self._literals(child, place)


class Code:
    """What the code says: the texts that expressions stand for.

    Args:
        package: The folder of the package.
    """

    def __init__(self, package: Path = PACKAGE) -> None:
        self._tree = Tree(package)

    def refusals(self) -> list[Text]:
        """All refusals, by file and line; each once, though several lines may lead to it."""
        found: dict[tuple[str, str], Text] = {}
        for file, tree in self._tree.trees.items():
            for node, place in self._tree.walk(tree, Place(file)):
                for text in self._raised(node, place):
                    self._keep(found, text)
        for definition in self._tree.functions:
            if "violation" in definition.node.name:
                for text in self.returned(definition):
                    self._keep(found, text)
        return sorted(found.values(), key=lambda text: (text.source.partition(":")[0], text.line, text.words))

    @staticmethod
    def _keep(found: dict[tuple[str, str], Text], text: Text) -> None:
        if not Code._is_sentence(text.words):
            return
        old = found.get((text.source, text.words), text)
        found[text.source, text.words] = replace(text, parts=text.parts | old.parts)

    def _raised(self, node: ast.AST, place: Place) -> Iterator[Text]:
        if isinstance(node, ast.Call) and self._is_sink(node.func):
            for argument in node.args:
                if not isinstance(argument, ast.Constant | ast.JoinedStr):  # these name what is read
                    yield from self.texts(argument, place)
        elif any("violation" in target for target, _ in assigned(node)):
            for _, value in assigned(node):
                yield from self.texts(value, place)
        elif (
            isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and last_name(node.exc.func)[-5:] == "Error"
        ):
            for argument in node.exc.args:
                yield from self.texts(argument, place)

    @staticmethod
    def _is_sink(function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and function.attr == "check":  # of torch's store
            return False
        return last_name(function) in SINKS

    def texts_in(self, source: str) -> list[Text]:
        """All sentences of a function or a constant, whether or not they are raised.

        Args:
            source: As `Text.source`.
        """
        found: list[Text] = []
        for node, place in self._tree.written.get(source, ()):
            text = self._piece(node, place)
            if self._is_sentence(text.words):
                found.append(text)
        return [text for text in found if not any(text.parts < other.parts for other in found)]

    def sentences(self) -> list[Text]:
        """All literals that are sentences, docstrings apart."""
        return [
            Text(words, place.source, node.lineno, frozenset([(place.file, node.lineno, node.col_offset)]))
            for nodes in self._tree.written.values()
            for node, place in nodes
            if len((words := words_of(node)).split()) >= LEAST and self._is_sentence(words)
        ]

    @staticmethod
    def _is_sentence(words: str) -> bool:
        """Whether it is more than a field, whose texts are found elsewhere."""
        return len(re.sub("<[^>]*>", "", words).split()) >= _SENTENCE

    def returned(self, definition: Definition, place: Place | None = None, index: int | None = None) -> list[Text]:
        """What a function returns or yields; of tuples, the element at `index`."""
        found = []
        for node in inside(definition.node):
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
                is_tuple = index is not None and isinstance(node.value, ast.Tuple)
                value = node.value.elts[index] if is_tuple else node.value  # type: ignore[attr-defined, index]
                found += self.texts(value, place or definition.place)
        return found

    # Following texts -------------------------------------------------------------------------------------------------

    def texts(self, node: ast.expr, place: Place) -> list[Text]:
        """What an expression may stand for, as far as it is followed."""
        match node:
            case ast.Constant(value=str()):
                return [self._text(str(node.value), node, place)]
            case ast.JoinedStr():
                return self._joined(node, place)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._added(left, right, place)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._union(node.elts, place)
            case ast.Dict():
                return self._union(node.values, place)
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int(index))):
                return self._called(call, place, index)
            case ast.Starred(value=value) | ast.Subscript(value=value) | ast.NamedExpr(value=value):
                return self.texts(value, place)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self.texts(node.elt, place) or self._union([node.generators[0].iter], place)
            case ast.DictComp():
                return self.texts(node.value, place)
            case ast.IfExp():
                return self._union([node.body, node.orelse], place)
            case ast.BoolOp(op=ast.Or(), values=[*values, ast.Constant(value=str())]):
                return [text for text in self._union(values, place) if text.words]
            case ast.BoolOp():
                return self._union(node.values, place)
            case ast.Name():
                return self._named(node.id, place)
            case ast.Call():
                return self._called(node, place)
        return []

    def _union(self, nodes: Iterable[ast.expr], place: Place) -> list[Text]:
        return [text for node in nodes for text in self.texts(node, place)]

    def _text(self, words: str, node: ast.expr, place: Place) -> Text:
        part = (place.file, node.lineno, node.col_offset)
        return Text(words, place.source, node.lineno, frozenset([part]))

    def _added(self, left: ast.expr, right: ast.expr, place: Place) -> list[Text]:
        """Two texts in one, or two lists of texts."""
        if is_string(left) or is_string(right):
            return [self._together([self._piece(left, place), self._piece(right, place)])]
        return self._union([left, right], place)

    def _joined(self, node: ast.JoinedStr, place: Place) -> list[Text]:
        """An f-string, with its fields in words where they are known."""
        pieces = [self._text("", node, place)]
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                piece = self._piece(value.value, place)
                quoted = repr(piece.words) if isinstance(value.value, ast.Subscript) else piece.words
                pieces.append(replace(piece, words=quoted) if value.conversion == ord("r") else piece)
            elif isinstance(value, ast.Constant):
                pieces.append(self._text(str(value.value), node, place))
        return [self._together(pieces)]

    @staticmethod
    def _together(pieces: list[Text]) -> Text:
        parts = frozenset[tuple[str, int, int]]().union(*(piece.parts for piece in pieces))
        return replace(pieces[0], words="".join(piece.words for piece in pieces), parts=parts)

    def _piece(self, node: ast.expr, place: Place) -> Text:
        """A part of a text: constants and sentences as they are, what may be left out in brackets, else its name."""
        if (literal := self._literal(node, place)) is not None:
            return literal
        found, has_others = self._alternatives(node, place)
        words = list(dict.fromkeys(text.words for text in found))
        sentences = [each for each in words if len(each.split()) >= _SENTENCE]
        argument = place.arguments[node.id][0] if isinstance(node, ast.Name) and node.id in place.arguments else node
        is_call = isinstance(argument, ast.Call) and len(set(words) - {""}) > 1
        if len(words) == 1 and not has_others and (sentences or isinstance(node, ast.Name)):
            as_is = words[0]
        elif not sentences or len(words) > MOST_ALTERNATIVES or is_call:
            as_is = shown(node)
        else:
            has_others = has_others or any(each and each not in sentences for each in words)
            as_is = f"[{' | '.join([*sentences, *([shown(node)] if has_others else [])])}]"
        return self._together([self._text(as_is, node, place), *(replace(text, words="") for text in found)])

    def _alternatives(self, node: ast.expr, place: Place) -> tuple[list[Text], bool]:
        """What a part of a text may stand for, and whether it may be something unknown, too."""
        branches: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            branches = [node.body, node.orelse]
        elif isinstance(node, ast.Name):
            given = self._given(node.id, place)
            branches = given if given and isinstance(given[0], ast.IfExp | ast.JoinedStr | ast.Constant) else []
        if branches:
            both = [self._alternatives(branch, place) for branch in branches]
            return [text for found, _ in both for text in found], any(is_unknown for _, is_unknown in both)
        found = self.texts(node, place)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            return [*found, self._text("", node, place)], False
        is_short = isinstance(node, ast.Name) and not any(len(text.words.split()) >= _SENTENCE for text in found)
        return found, is_short or not found

    def _given(self, name: str, place: Place) -> list[ast.expr]:
        """The values that a variable of the function is given."""
        scopes = (self._tree.values_in(scope) for scope in reversed(place.nodes) if isinstance(scope, ast.FunctionDef))
        return next((values[name] for values in scopes if name in values), [])

    def _named(self, name: str, place: Place) -> list[Text]:
        """What a variable, a parameter or a constant may stand for."""
        for scope in reversed(place.nodes):
            if isinstance(scope, ast.FunctionDef) and name in self._tree.values_in(scope):
                if (scope, name) in place.calls:
                    return []
                inner = replace(place, calls=(*place.calls, (scope, name)))
                return self._union(self._tree.values_in(scope)[name], inner)
        if name in place.arguments:
            return self.texts(*place.arguments[name])
        file, name = self._tree.imports[place.file].get(name, (place.file, name))
        constants = self._tree.constants.get(file, {}).get(name, [])
        return self._union(constants, Place(file, (name,)))

    def _called(self, node: ast.Call, place: Place, index: int | None = None) -> list[Text]:
        """What a call may return."""
        name = last_name(node.func)
        if isinstance(node.func, ast.IfExp):
            functions = [node.func.body, node.func.orelse]
            return self._union(
                [ast.copy_location(ast.Call(f, node.args, node.keywords), node) for f in functions], place
            )
        if name in PASSING and node.args:
            return self._union(node.args, place)
        if is_string(node):
            return self._listed(node, place)
        if isinstance(node.func, ast.Attribute) and name in ("values", "format"):
            found = self.texts(node.func.value, place)
            return [replace(text, words=filled(text.words, node)) for text in found] if name == "format" else found
        found = []
        for definition in self._definitions(node.func, place):
            if definition.node not in place.calls and len(place.calls) < 12:
                found += self.returned(definition, self._inside_call(definition, node, place), index)
        return found

    def _listed(self, node: ast.Call, place: Place) -> list[Text]:
        """The sentences of a list that is joined to one text, if the function writes them itself."""
        (joined,) = node.args
        given = self._given(joined.id, place) if isinstance(joined, ast.Name) else []
        if not given or not isinstance(given[0], ast.List):
            return []
        found = self.texts(joined, place)
        words = f"[{' | '.join(text.words for text in found)}]"
        return [replace(self._together(found), words=words)] if found else []

    def _definitions(self, function: ast.expr, place: Place) -> list[Definition]:
        """The functions of the package that a call may mean: by name, methods in the same file first."""
        name = last_name(function)
        if isinstance(function, ast.Name):
            file, name = self._tree.imports[place.file].get(function.id, (place.file, function.id))
            here = [one for one in self._tree.by_name.get(name, []) if one.place.file in (file, f"{file}/__init__")]
            return [one for one in here if not isinstance(one.place.nodes[-2:][0], ast.ClassDef)]
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name | ast.Call):
            found = self._tree.by_name.get(name, [])
            if isinstance(function.value, ast.Name) and function.value.id in ("self", "cls"):
                return [one for one in found if one.place.file == place.file and len(one.place.nodes) > 1]
            return found if name.endswith(("violations", "violation")) else []
        return []

    @staticmethod
    def _inside_call(definition: Definition, call: ast.Call, place: Place) -> Place:
        names = [argument.arg for argument in definition.node.args.args if argument.arg not in ("self", "cls")]
        arguments = dict(zip(names, call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        return replace(
            definition.place,
            arguments={name: (value, place) for name, value in arguments.items()},
            calls=(*place.calls, definition.node),
        )

    # Constants -------------------------------------------------------------------------------------------------------

    def _literal(self, node: ast.expr, place: Place) -> Text | None:
        """A constant of the package, or its elements with commas between them; `None` for anything else."""
        match node:
            case ast.Constant():
                return self._text(str(node.value), node, place)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="type"), args=[ast.Name(id="self")]), attr="__name__"):
                return self._text(place.path[0], node, place)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
                found = self._elements(name, place)
                return found[index] if index < len(found) else None
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[inner]):
                inner = inner.args[-1] if isinstance(inner, ast.Call) and last_name(inner.func) == "map" else inner
                found = self._elements(inner.id, place) if isinstance(inner, ast.Name) else []
                return replace(found[0], words=between.join(each.words for each in found)) if found else None
            case ast.Name(id=name) if name.isupper():
                found = self._constants_of(name, place)
                return found[0] if len(found) == 1 else None
        return None

    def _elements(self, name: str, place: Place) -> list[Text]:
        """The elements of a constant tuple, or the keys of a constant dictionary."""
        file, name = self._tree.imports[place.file].get(name, (place.file, name))
        values = self._tree.constants.get(file, {}).get(name, [])
        if len(values) != 1 or not name.isupper():
            return []
        value, inside = values[0], Place(file, (name,))
        elements = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        return [self._text(str(one.value), one, inside) for one in elements if isinstance(one, ast.Constant)]

    def _constants_of(self, name: str, place: Place) -> list[Text]:
        file, name = self._tree.imports[place.file].get(name, (place.file, name))
        values = self._tree.constants.get(file, {}).get(name, [])
        return [
            self._text(str(one.value), one, Place(file, (name,))) for one in values if isinstance(one, ast.Constant)
        ]
