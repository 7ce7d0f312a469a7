"""Two definitions with one name: each user still gets the right one in the script, or the export is refused."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import zharness
from zharness.errors import HarnessFault
from zharness.export.collect import DefinitionCollection, read_source

SKETCH = "zharness.sketch"  # a package of a test's own, for only this package's modules are collected from

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes modules of the package SKETCH: ``a="X = 1"``. Two underscores stand for a dot."""
    monkeypatch.setattr(zharness, "__path__", [*zharness.__path__, str(tmp_path)])

    def written(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path.joinpath("sketch", *name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))

    yield written
    for name in [name for name in sys.modules if name.startswith(SKETCH)]:
        del sys.modules[name]
    vars(zharness).pop("sketch", None)
    read_source.cache_clear()


def execute_script(collection: DefinitionCollection, folder: Path) -> dict[str, Any]:
    """Run a script of the collected definitions and return its globals."""
    path = folder / "script.py"
    path.write_text("\n\n".join([*collection.imports.values(), *collection.texts.values()]))
    return runpy.run_path(str(path))


def added(collection: DefinitionCollection, *names: str) -> list[str]:
    """Collect definitions of SKETCH (``a.X`` is the X of its module a) and return their names in the script."""
    return [collection.add(f"{SKETCH}.{module}", name) for module, _, name in (each.rpartition(".") for each in names)]


def test_two_constants_spelled_alike_are_two_where_their_words_mean_two_things(write: Write, tmp_path: Path) -> None:
    write(a="BASE = 1\nLIMIT = 3 * BASE\n", b="BASE = 7\nLIMIT = 3 * BASE\n")
    collection = DefinitionCollection()
    assert added(collection, "a.LIMIT", "b.LIMIT") == ["LIMIT", "b_LIMIT"]
    script = execute_script(collection, tmp_path)
    assert (script["LIMIT"], script["b_LIMIT"]) == (3, 21)


@pytest.mark.parametrize("base", ["from zharness.sketch.c import BASE", "BASE = 1", "from math import pi as BASE"])
def test_two_constants_spelled_alike_are_one_where_their_words_mean_the_same(write: Write, base: str) -> None:
    text = f"{base}\nLIMIT = max(3, BASE)\n"
    write(a=text, b=text, c="BASE = 2\n")
    collection = DefinitionCollection()
    assert added(collection, "a.LIMIT", "b.LIMIT") == ["LIMIT", "LIMIT"]
    assert collection.texts["LIMIT"] == "LIMIT = max(3, BASE)"


def test_of_two_constants_spelled_alike_neither_takes_the_other_s_import(write: Write) -> None:
    write(a="from math import sqrt\nROOT = sqrt(4)\n", b="from cmath import sqrt\nROOT = sqrt(4)\n")
    with pytest.raises(HarnessFault, match="a script cannot hold both: from math import sqrt and: from cmath"):
        added(DefinitionCollection(), "a.ROOT", "b.ROOT")


def test_two_constants_spelled_alike_may_speak_of_themselves(write: Write, tmp_path: Path) -> None:
    text = "SUM = lambda n: n and BASE + SUM(n - 1)\n"
    write(a=f"BASE = 1\n{text}", b=f"BASE = 7\n{text}")
    collection = DefinitionCollection()
    assert added(collection, "a.SUM", "b.SUM") == ["SUM", "b_SUM"]
    script = execute_script(collection, tmp_path)
    assert (script["SUM"](3), script["b_SUM"](3)) == (3, 21)


def test_several_names_that_two_modules_spell_alike_are_refused_where_they_mean_two_things(write: Write) -> None:
    write(a="BASE = 1\nLOW, HIGH = BASE, 9\n", b="BASE = 7\nLOW, HIGH = BASE, 9\n", c="BASE = 1\nLOW, HIGH = BASE, 9\n")
    collection = DefinitionCollection()
    assert added(collection, "a.LOW", "c.HIGH") == ["LOW", "HIGH"]
    with pytest.raises(HarnessFault, match="one script cannot hold both"):
        added(collection, "b.LOW")


def test_the_same_name_of_three_modules_is_three_names(write: Write, tmp_path: Path) -> None:
    user = "def told():\n    return {}\n\n\ndef asked():\n    return told()\n"
    write(checks=user.format(1), doctor__command=user.format(2), export__command=user.format(3))
    collection = DefinitionCollection()
    told = added(collection, "checks.told", "doctor.command.told", "export.command.told")
    assert told == ["told", "command_told", "command_told_2"]
    assert added(collection, "doctor.command.told", "export.command.told") == told[1:], "what it was called before"
    asked = added(collection, "checks.asked", "doctor.command.asked", "export.command.asked")
    script = execute_script(collection, tmp_path)
    assert [script[name]() for name in [*told, *asked]] == [1, 2, 3, 1, 2, 3]


def test_the_third_of_three_definitions_of_this_package_is_not_dropped() -> None:
    collection = DefinitionCollection()
    modules = ("zharness.engines.reference", "zharness.engines.deepspeed_capabilities", "zharness.engines.fsdp2")
    called = [collection.add(module, "capabilities_at") for module in modules]
    assert called == ["capabilities_at", "deepspeed_capabilities_capabilities_at", "fsdp2_capabilities_at"]
    assert {f"def {name}" for name in called} <= {text.partition("(")[0] for text in collection.texts.values()}


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("reserved", frozenset({"b_told"})),
        ("provided", frozenset({"b_told"})),
        ("import_overrides", {"b_told": "from math import pi as b_told"}),
        ("imports", {"b_told": "from math import pi as b_told"}),
    ],
)
def test_a_second_definition_is_not_called_what_the_script_calls_something_else(
    write: Write, part: str, names: Any
) -> None:
    write(a="told = 1\n", b="told = 2\n")
    assert added(DefinitionCollection(**{part: names}), "a.told", "b.told") == ["told", "b_told_2"]


@pytest.mark.parametrize("order", [("b.told", "b.b_told"), ("b.b_told", "b.told")])
def test_a_second_definition_is_not_called_what_its_module_calls_another(
    write: Write, tmp_path: Path, order: tuple[str, str]
) -> None:
    write(a="told = 1\n", b="told = 2\nb_told = 3\n")
    collection = DefinitionCollection()
    called = added(collection, "a.told", *order)
    assert len(set(called)) == 3
    script = execute_script(collection, tmp_path)
    assert [script[name] for name in called] == ([1, 2, 3] if order[0] == "b.told" else [1, 3, 2])


WITHIN = {
    "a function": "def told(): return 5",
    "a class": "class told: pass",
    "an exception": """
        try: raise ValueError
        except ValueError as told: pass
    """,
    "an import": "from math import pi as told",
    "a module": "import told.path",
    "a parameter": "inner = lambda told: told",
    "a loop": "inner = [told for told in range(3)]",
    "a pattern": """
        match 3:
            case told: pass
    """,
    "a target": "told = 3",
    "the module's": "global told; told = 3",
}


def scopes(within: str) -> str:
    """Return a function that reads its module's ``told`` in one scope and binds that name in another."""
    body = "\n".join(f"        {line}" for line in dedent(within).strip().splitlines())
    return f"def asked():\n    def other():\n{body}\n    return told()\n"


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_a_renamed_definition_is_not_mistaken_for_anything_within_another(write: Write, within: str) -> None:
    text = f"def told():\n    return 1\n\n\n{scopes(within)}"
    write(a=text, b=text)
    collection = DefinitionCollection()
    assert added(collection, "a.asked") == ["asked"], "what has its own name is mistaken for nothing"
    with pytest.raises(HarnessFault, match="told is both a module-level name and a name inside"):
        added(collection, "b.asked")


@pytest.mark.parametrize(
    "text",
    [
        "asked = [told(), [told for told in range(3)]]",
        "asked = lambda other: (told(), (lambda told: told)(other))",
        "class asked:\n    told = 3\n    kept = [told, *(told() for _ in range(1))]",
    ],
    ids=["comprehension", "lambda", "class"],
)
def test_nor_for_anything_within_what_is_no_function(write: Write, text: str) -> None:
    write(a="told = 1\n", b=f"def told():\n    return 2\n\n\n{text}\n")
    with pytest.raises(HarnessFault, match="told is both a module-level name and a name inside"):
        added(DefinitionCollection(), "a.told", "b.asked")


def test_what_is_told_within_a_function_alone_is_left_as_it_is(write: Write, tmp_path: Path) -> None:
    inner = "def asked():\n    def told():\n        return 5\n    return told()\n"
    write(a="told = 1\n", b=f"def told():\n    return 2\n\n\n{inner}")
    collection = DefinitionCollection()
    added(collection, "a.told", "b.told", "b.asked")
    assert collection.texts["asked"] == inner.strip()
    assert execute_script(collection, tmp_path)["asked"]() == 5


def test_a_method_may_call_the_renamed_function_that_has_its_name(write: Write, tmp_path: Path) -> None:
    text = "class Asked:\n    def told(self):\n        return told()\n"
    write(a="told = 1\n", b=f"def told():\n    return 2\n\n\n{text}")
    collection = DefinitionCollection()
    added(collection, "a.told", "b.Asked")
    assert execute_script(collection, tmp_path)["Asked"]().told() == 2


@pytest.mark.parametrize(("value", "right"), [("5", 5), ("told", 2), ("c.told", 3)])
def test_a_field_keeps_the_name_that_its_class_gave_it(write: Write, tmp_path: Path, value: str, right: int) -> None:
    text = f"class Asked:\n    told: int = {value}\n\n    def asked(self):\n        return told\n"
    write(a="told = 1\n", b=f"from zharness.sketch import c\n\ntold = 2\n\n\n{text}", c="told = 3\n")
    collection = DefinitionCollection()
    added(collection, "a.told", "b.Asked")
    asked = execute_script(collection, tmp_path)["Asked"]()
    assert (asked.told, asked.asked()) == (right, 2)


def test_what_a_class_body_reads_before_it_has_that_name_is_its_module_s(write: Write, tmp_path: Path) -> None:
    write(a="told = 1\n", b="told = 2\n\n\nclass Asked:\n    other = told\n    told = told\n")
    collection = DefinitionCollection()
    added(collection, "a.told", "b.Asked")
    asked = execute_script(collection, tmp_path)["Asked"]
    assert (asked.other, asked.told) == (2, 2)


def test_a_class_s_field_may_be_called_as_what_a_module_has(write: Write, tmp_path: Path) -> None:
    write(a="told = 1\n", b="from zharness.sketch import a\n\n\nclass Asked:\n    told: int = a.told\n")
    collection = DefinitionCollection()
    added(collection, "b.Asked")
    assert execute_script(collection, tmp_path)["Asked"].told == 1


@pytest.mark.parametrize("loop", ["for told in range(3): pass", "for told in range(3): other = told"])
def test_a_loop_of_a_class_body_reads_its_own_variable(write: Write, loop: str) -> None:
    write(a=f"class Asked:\n    {loop}\n")
    assert added(DefinitionCollection(), "a.Asked") == ["Asked"]


def test_nothing_within_a_definition_is_mistaken_for_a_new_name(write: Write) -> None:
    write(a="told = 1\n", b="told = 2\ndef asked(b_told):\n    return told + b_told\n")
    with pytest.raises(HarnessFault, match="b_told is both a module-level name and a name inside"):
        added(DefinitionCollection(), "a.told", "b.asked")


def test_a_parameter_that_is_called_as_a_module_is_not_that_module(write: Write) -> None:
    text = "def asked(a):\n    return a.told\n"
    write(a="told = 1\n", b=f"from zharness.sketch import a\n\n\n{text}\n\ndef other():\n    return a.told\n")
    collection = DefinitionCollection()
    added(collection, "b.asked", "b.other")
    assert collection.texts["asked"] == text.strip()
    assert collection.texts["other"] == "def other():\n    return told"


def test_a_name_that_is_imported_within_a_try_is_imported(write: Write, tmp_path: Path) -> None:
    write(
        a="try:\n    from math import pi\nexcept ImportError:\n    from cmath import pi\n",
        b="from zharness.sketch.a import pi\n\n\nTWICE = 2 * pi\n",
    )
    collection = DefinitionCollection()
    added(collection, "b.TWICE")
    assert collection.imports == {"pi": "from math import pi"}
    assert execute_script(collection, tmp_path)["TWICE"] > 6
