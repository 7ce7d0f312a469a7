"""Collect definitions of this package, and all definitions that they use, as the source text of a script.

The script then works without the package. A definition is a function, a class or an assignment at module level. The
syntax tree of a definition shows what the definition uses: names of its own module, names imported from this package,
and attributes of imported modules of this package. The script imports other packages.
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
_TOOL_COMMENT = re.compile(r"  # (type: ignore|noqa)[^\n]*")  # comments for linters and type checkers


@dataclass(frozen=True)
class ModuleSource:
    """The source text of a module, its definitions by name, and its imports by the name that they bind."""

    module: str
    text: str
    definitions: Mapping[str, ast.stmt]
    imports: Mapping[str, str]  # import statements of other packages
    # Imports of this package, as module and name in it; the name is empty if the import binds the module itself.
    package_imports: Mapping[str, tuple[str, str]]


@cache
def read_source(module: str) -> ModuleSource:
    """Import the module called ``module``, parse its source text, and return its definitions and imports."""
    imported: ModuleType = importlib.import_module(module)
    text = inspect.getsource(imported)
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    package_imports: dict[str, tuple[str, str]] = {}
    for statement in top_level_statements(text):
        for name in defined_names(statement):
            definitions[name] = statement
        for name, origin, spelled in imported_names(statement):
            if origin[0].split(".")[0] == PACKAGE:
                package_imports[name] = origin
            else:
                imports[name] = spelled
    return ModuleSource(module, text, definitions, imports, package_imports)


def top_level_statements(text: str) -> Iterator[ast.stmt]:
    """Yield the module-level statements, including those under ``if TYPE_CHECKING``, which annotations need.

    Of a ``try``, only the statements of its first block are yielded: a script is written for a release of torch in
    which the imports of this block work.
    """
    for statement in ast.parse(text).body:
        yield from statement.body if isinstance(statement, ast.Try) else (statement,)
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            yield from statement.body if statement.test.id == "TYPE_CHECKING" else ()


def defined_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a module-level statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    for target in targets:
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def imported_names(statement: ast.stmt) -> Iterator[tuple[str, tuple[str, str], str]]:
    """Yield (name, origin, statement) for each name that an import statement binds.

    ``origin`` is the module and the name in that module (empty if the module itself is bound). The yielded statement
    imports only this name.
    """
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
    """The definitions of a script in the order of their dependencies, with the imports that they need.

    ``provided`` are names that the fixed parts of the script define; they are not collected. ``import_overrides`` maps
    the name of a definition to the import that replaces the definition. ``reserved`` are names that the script uses, so
    no collected definition may have one of them. Methods raise HarnessFault if two definitions would need the same
    name.
    """

    provided: frozenset[str] = frozenset()
    import_overrides: Mapping[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    imports: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    _definition_sites: dict[str, tuple[str, str]] = field(default_factory=dict)  # by name: module and key
    _in_progress: set[tuple[str, str]] = field(default_factory=set)
    _aliases: dict[tuple[str, ast.AST], tuple[str, str]] = field(default_factory=dict)

    def add(self, module: str, name: str) -> str:
        """Collect the definition ``name`` of ``module`` and all that it uses; return its name in the script.

        The name stays the same unless a definition of another module already has it. In that case the module's name is
        added as a prefix, and a number as well if the prefixed name exists too.
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
            raise HarnessFault(f"{module} does not define {name}, so a script cannot contain {name}")
        key, called = self._resolve_key(module, name, statement)
        if key not in self.texts and (module, key) not in self._in_progress:
            self._in_progress.add((module, key))
            text = self.render_expression(module, statement)
            self.texts[key] = text
        return called

    def _resolve_key(self, module: str, name: str, statement: ast.stmt) -> tuple[str, str]:
        """Return the key under which a definition's text is stored, and the name that ``name`` gets in the script."""
        names = [*defined_names(statement)]
        key = "/".join(names)
        others = {self._definition_sites.get(defined, (module, key)) for defined in names} - {(module, key)}
        if not others and (self.reserved | self.imports.keys()).isdisjoint(names):
            self._definition_sites.update(dict.fromkeys(names, (module, key)))
            return key, name
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and self._is_same_assignment(module, key, statement):
            return key, name
        if key != name:
            elsewhere = " and ".join(sorted(other for other, _ in others)) or "the script"
            raise HarnessFault(f"{key} is defined in {module} and in {elsewhere}: one script cannot hold both")
        alias = self._make_alias(module, name, statement)
        return alias, alias

    def _is_same_assignment(self, module: str, key: str, statement: ast.stmt) -> bool:
        """Return whether the script already has an equal assignment from another module.

        The rendered texts are compared, since equal source texts may refer to different names.
        """
        if key not in self.texts or (module, statement) in self._aliases:
            return False
        if (module, key) in self._in_progress:  # a recursive call: the text depends on the result of this comparison
            return False
        self._in_progress.add((module, key))
        is_same = self.render_expression(module, statement) == self.texts[key]
        self._in_progress.remove((module, key))
        return is_same

    def _make_alias(self, module: str, name: str, statement: ast.stmt) -> str:
        """Return a new name for a definition whose name is taken; later calls return the same new name."""
        if (module, statement) not in self._aliases:
            known = (
                self.provided
                | self.reserved
                | self.import_overrides.keys()
                | self.imports.keys()
                | self._definition_sites.keys()
            )
            alias = first = f"{module.rpartition('.')[2]}_{name}"
            number = 1
            while alias in known:
                number += 1
                alias = f"{first}_{number}"
            self._aliases[module, statement] = name, alias
            self._definition_sites[alias] = module, name
        return self._aliases[module, statement][1]

    def render_expression(self, module: str, node: ast.AST) -> str:
        """Return the text of the syntax node ``node`` of ``module``, after collecting all that the node uses."""
        here = read_source(module)
        original = replace_nodes(here.text, node, [])
        changes = [*self._find_replacements(here, node, find_free_names(original))]
        text = replace_nodes(here.text, node, [(used, called) for used, _, called in changes])
        # An inner variable with the old name would be renamed too, and one with the new name would hide the definition.
        mistaken = find_bound_names(original) & {name for _, name, _ in changes}
        mistaken |= find_bound_names(text) & {called for *_, called in changes}
        if mistaken:
            raise HarnessFault(f"{module}: {min(mistaken)} is both a module-level name and a name inside a definition")
        alias = self._aliases.get((module, node))
        text = _TOOL_COMMENT.sub("", text)
        return text if alias is None else rename_definition(text, *alias)

    def _find_replacements(
        self, module_source: ModuleSource, node: ast.AST, free_names: frozenset[str]
    ) -> Iterator[tuple[ast.AST, str, str]]:
        """Yield (node, old name, new name) for each node inside ``node`` that has another name in the script.

        ``free_names`` are the names that ``node`` reads from its module; the definitions of these names are collected.
        """
        modules: set[ast.AST] = set()
        for used in ast.walk(node):  # ast.walk yields an attribute before the name in it
            if isinstance(used, ast.Attribute) and isinstance(used.value, ast.Name) and used.value.id in free_names:
                reached = resolve_module_attribute(module_source, used.value.id, used.attr)
                if reached is not None:
                    modules.add(used.value)
                    yield used, used.value.id, self.add(*reached)
            elif isinstance(used, ast.Name) and used.id in free_names and used not in modules:
                called = self._resolve_name(module_source, used.id)
                if called != used.id and isinstance(used.ctx, ast.Load):  # class fields keep their names
                    yield used, used.id, called

    def _resolve_name(self, module_source: ModuleSource, name: str) -> str:
        """Collect the definition or import to which ``name`` refers, and return its name in the script."""
        if name in module_source.package_imports and module_source.package_imports[name][1]:
            return self.add(*module_source.package_imports[name])
        if name in module_source.definitions:
            return self.add(module_source.module, name)
        if name in module_source.imports:
            self._add_import(name, module_source.imports[name])
        elif not hasattr(builtins, name) and name not in module_source.package_imports and name not in self.provided:
            raise HarnessFault(
                f"{module_source.module} uses {name}, which has no definition that a script could contain"
            )
        return name

    def _add_import(self, name: str, statement: str) -> None:
        """Add an import. Raises HarnessFault if the script already uses the imported name for something else."""
        if name in self._definition_sites:
            raise HarnessFault(f"the script defines {name} itself, so it cannot also contain: {statement}")
        if self.imports.setdefault(name, statement) != statement:
            raise HarnessFault(f"a script cannot hold both: {self.imports[name]} and: {statement}")


def rename_definition(text: str, old_name: str, new_name: str) -> str:
    """Return ``text`` with another name for the function, class or assignment that it defines."""
    return re.sub(rf"^(def |class |){old_name}\b", rf"\1{new_name}", text, count=1, flags=re.MULTILINE)


def resolve_definition(module: str, name: str) -> tuple[str, str]:
    """Return the module in which ``name`` of ``module`` is defined, and its name there, following re-exports."""
    here = read_source(module)
    while name not in here.definitions and name in here.package_imports:
        module, name = here.package_imports[name]
        here = read_source(module)
    return module, name


def resolve_module_attribute(module_source: ModuleSource, value: str, name: str) -> tuple[str, str] | None:
    """Return the module and the name to which ``value.name`` refers.

    Return None if ``value`` is not a module of this package.
    """
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
    """Return the source text of ``node``, including decorators, with some inner nodes replaced by other text."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    whole = text.encode()

    def byte_offset(line: int, column: int) -> int:
        """Return the position in ``whole`` of a line and column; ast counts columns in bytes."""
        return starts[line - 1] + column

    decorators = getattr(node, "decorator_list", [])
    first = min([node, *decorators], key=lambda part: part.lineno)
    begin = byte_offset(first.lineno, 0 if decorators else node.col_offset)  # type: ignore[attr-defined]
    end = byte_offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    for changed, new_text in sorted(replacements, key=lambda change: -change[0].col_offset - 10_000 * change[0].lineno):  # type: ignore[attr-defined]
        start = byte_offset(changed.lineno, changed.col_offset)  # type: ignore[attr-defined]
        stop = byte_offset(changed.end_lineno, changed.end_col_offset)  # type: ignore[attr-defined]
        whole = whole[:start] + new_text.encode() + whole[stop:]
        end += len(new_text.encode()) - (stop - start)
    return whole[begin:end].decode()
