"""Definitions of this package as text, with all that they use of it, so that a script can stand without it.

A definition is a function, a class or an assignment at the top of a module. What it uses is read off its syntax tree:
names of the module it stands in, names that module imports from this package, and attributes of modules that it
imports. Of other packages only the import is taken.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

from zharness.errors import HarnessFault
from zharness.export.scopes import find_bound_names, find_free_names

PACKAGE = "zharness"
_TOOL_COMMENT = re.compile(r"  # (type: ignore|noqa)[^\n]*")  # words to tools that a reader of the script does not run


@dataclass(frozen=True)
class ModuleSource:
    """A module's text, its definitions by name, and what its imports bind: a name to the import, or to one of ours."""

    module: str
    text: str
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, str]  # of other packages: the statement
    package_imports: Mapping[
        str, tuple[str, str]
    ]  # of this package: the module and the name there, empty for the module itself


@cache
def read_source(module: str) -> ModuleSource:
    """The module of that name, read."""
    found: ModuleType = importlib.import_module(module)
    text = inspect.getsource(found)
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    ours: dict[str, tuple[str, str]] = {}
    for statement in top_level_statements(text):
        for name in defined_names(statement):
            definitions[name] = statement
        for name, origin, spelled in imported_names(statement):
            if origin[0].split(".")[0] == PACKAGE:
                ours[name] = origin
            else:
                imports[name] = spelled
    return ModuleSource(module, text, definitions, imports, ours)


def top_level_statements(text: str) -> Iterator[ast.stmt]:
    """The statements at the top of a module, with those that are for type checkers alone: annotations name them."""
    for statement in ast.parse(text).body:
        yield statement
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            yield from statement.body if statement.test.id == "TYPE_CHECKING" else ()


def defined_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    for target in targets:
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def imported_names(statement: ast.stmt) -> Iterator[tuple[str, tuple[str, str], str]]:
    """What an import binds: the name, the module and the name in it, and a statement that imports it alone."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            spelled = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            yield name, (alias.name, ""), spelled
    elif isinstance(statement, ast.ImportFrom) and statement.module and statement.module != "__future__":
        for alias in statement.names:
            name = alias.asname or alias.name
            spelled = f"from {statement.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            yield name, (statement.module, alias.name), spelled


@dataclass
class DefinitionCollection:
    """Definitions that were asked for and all that they use, each before what uses it, and the imports they need.

    ``given`` are names that the script has from elsewhere: they are not looked for. ``instead`` are imports that take
    the place of a definition, by its name. ``taken`` are names of things of the script's own, for which nothing here is
    to be mistaken. Raises HarnessFault where two definitions of one name would meet.
    """

    provided: frozenset[str] = frozenset()
    import_overrides: Mapping[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    imports: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    _definition_sites: dict[str, tuple[str, str]] = field(default_factory=dict)  # by each name, the module and the key
    _in_progress: set[tuple[str, str]] = field(default_factory=set)
    _aliases: dict[tuple[str, ast.AST], tuple[str, str]] = field(default_factory=dict)

    def add(self, module: str, name: str) -> str:
        """The definition ``name`` of ``module`` and all that it uses; returns what it is called in the script.

        That is its own name, or, where another module's definition has that, one with its module's before it, and a
        number after it where something has that too.
        """
        if name in self.provided:
            return name
        if name in self.import_overrides:
            self.imports[name] = self.import_overrides[name]
            return name
        module, name = resolve_definition(module, name)
        here = read_source(module)
        if name in here.imports:
            self._add_import(name, here.imports[name])
            return name
        statement = here.definitions.get(name)
        if statement is None:
            raise HarnessFault(f"{module} defines no {name}, so it cannot be written into a script")
        key, called = self._resolve_key(module, name, statement)
        if key not in self.texts and (module, key) not in self._in_progress:
            self._in_progress.add((module, key))
            text = self.render_expression(module, statement)
            self.texts[key] = text
        return called

    def _resolve_key(self, module: str, name: str, statement: ast.stmt) -> tuple[str, str]:
        """Under which key the text of a definition is kept, and what ``name``, which it defines, is called there."""
        names = [*defined_names(statement)]
        key = "/".join(names)
        others = {self._definition_sites.get(each, (module, key)) for each in names} - {(module, key)}
        if not others and (self.reserved | self.imports.keys()).isdisjoint(names):
            self._definition_sites.update(dict.fromkeys(names, (module, key)))
            return key, name
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and self._is_same_assignment(module, key, statement):
            return key, name
        if key != name:
            elsewhere = " and ".join(sorted(where for where, _ in others)) or "the script"
            raise HarnessFault(f"{key} is defined in {module} and in {elsewhere}: one script cannot hold both")
        aside = self._make_alias(module, name, statement)
        return aside, aside

    def _is_same_assignment(self, module: str, key: str, statement: ast.stmt) -> bool:
        """Whether the script has this assignment already, from another module.

        Its words are compared as the script has them, where each means one thing: two files may spell alike what is not
        the same in both.
        """
        if key not in self.texts or (module, statement) in self._aliases:
            return False
        if (
            module,
            key,
        ) in self._in_progress:  # it is being compared, and speaks of itself: what it says hangs on the answer
            return False
        self._in_progress.add((module, key))
        alike = self.render_expression(module, statement) == self.texts[key]
        self._in_progress.remove((module, key))
        return alike

    def _make_alias(self, module: str, name: str, statement: ast.stmt) -> str:
        """What the script calls the ``name`` of ``module``, where something else has that name: always the same."""
        if (module, statement) not in self._aliases:
            known = (
                self.provided
                | self.reserved
                | self.import_overrides.keys()
                | self.imports.keys()
                | self._definition_sites.keys()
            )
            aside = first = f"{module.rpartition('.')[2]}_{name}"
            number = 1
            while aside in known:
                number += 1
                aside = f"{first}_{number}"
            self._aliases[module, statement] = name, aside
            self._definition_sites[aside] = module, name
        return self._aliases[module, statement][1]

    def render_expression(self, module: str, node: ast.AST) -> str:
        """The text of a piece of ``module``; all that it uses is added first."""
        here = read_source(module)
        own = replace_nodes(here.text, node, [])
        changes = [*self._find_replacements(here, node, find_free_names(own))]
        text = replace_nodes(here.text, node, [(used, called) for used, _, called in changes])
        # What has the old name within would be changed too; what has the new one there would be taken for the other.
        mistaken = find_bound_names(own) & {name for _, name, _ in changes}
        mistaken |= find_bound_names(text) & {called for *_, called in changes}
        if mistaken:
            raise HarnessFault(f"{module}: {min(mistaken)} is a name at the top and of something within a definition")
        aside = self._aliases.get((module, node))
        text = _TOOL_COMMENT.sub("", text)
        return text if aside is None else rename_definition(text, *aside)

    def _find_replacements(
        self, module_source: ModuleSource, node: ast.AST, free_names: frozenset[str]
    ) -> Iterator[tuple[ast.AST, str, str]]:
        """What is called otherwise in the script: where it stands, the name that leads to it there, and the script's.

        ``outer`` are the names that ``node`` takes from its module: they are added to the script.
        """
        modules: set[ast.AST] = set()
        for used in ast.walk(node):  # an attribute comes before the name that it is one of
            if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name) and used.value.id in free_names:
                reached = resolve_module_attribute(module_source, used.value.id, used.attr)
                if reached is not None:
                    modules.add(used.value)
                    yield used, used.value.id, self.add(*reached)
            elif isinstance(used, ast.Name) and used.id in free_names and used not in modules:
                called = self._resolve_name(module_source, used.id)
                if called != used.id and isinstance(used.ctx, ast.Load):  # a class's field keeps its name
                    yield used, used.id, called

    def _resolve_name(self, module_source: ModuleSource, name: str) -> str:
        """What the script calls what ``here`` calls ``name``."""
        if name in module_source.package_imports and module_source.package_imports[name][1]:
            return self.add(*module_source.package_imports[name])
        if name in module_source.definitions:
            return self.add(module_source.module, name)
        if name in module_source.imports:
            self._add_import(name, module_source.imports[name])
        elif not hasattr(builtins, name) and name not in module_source.package_imports and name not in self.provided:
            raise HarnessFault(
                f"{module_source.module} uses {name}, which is defined nowhere that a script could take it from"
            )
        return name

    def _add_import(self, name: str, statement: str) -> None:
        if name in self._definition_sites:
            raise HarnessFault(f"a script cannot hold both its own {name} and: {statement}")
        if self.imports.setdefault(name, statement) != statement:
            raise HarnessFault(f"a script cannot hold both: {self.imports[name]} and: {statement}")


def rename_definition(text: str, old_name: str, new_name: str) -> str:
    """A definition at the top of a module under another name than its ``own``."""
    return re.sub(rf"^(def |class |){old_name}\b", rf"\1{new_name}", text, count=1, flags=re.MULTILINE)


def resolve_definition(module: str, name: str) -> tuple[str, str]:
    """Where what ``module`` calls ``name`` is defined: a package hands on names of its files."""
    here = read_source(module)
    while name not in here.definitions and name in here.package_imports:
        module, name = here.package_imports[name]
        here = read_source(module)
    return module, name


def resolve_module_attribute(module_source: ModuleSource, value: str, name: str) -> tuple[str, str] | None:
    """The module and the name that ``nets.MLP`` speaks of, where ``nets`` is a module of this package."""
    if value not in module_source.package_imports:
        return None
    module, inner = module_source.package_imports[value]
    path = f"{module}.{inner}" if inner else module
    try:
        found = importlib.import_module(path)
    except ImportError:
        return None
    return (found.__name__, name) if isinstance(found, ModuleType) else None


def replace_nodes(text: str, node: ast.AST, replacements: list[tuple[ast.AST, str]]) -> str:
    """The text of ``node``, decorators included, with other words for some nodes in it."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    whole = text.encode()

    def byte_offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    decorators = getattr(node, "decorator_list", [])
    first = min([node, *decorators], key=lambda each: each.lineno)
    begin = byte_offset(first.lineno, 0 if decorators else node.col_offset)  # type: ignore[attr-defined]
    end = byte_offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    for changed, words in sorted(replacements, key=lambda change: -change[0].col_offset - 10_000 * change[0].lineno):  # type: ignore[attr-defined]
        start = byte_offset(changed.lineno, changed.col_offset)  # type: ignore[attr-defined]
        stop = byte_offset(changed.end_lineno, changed.end_col_offset)  # type: ignore[attr-defined]
        whole = whole[:start] + words.encode() + whole[stop:]
        end += len(words.encode()) - (stop - start)
    return whole[begin:end].decode()
