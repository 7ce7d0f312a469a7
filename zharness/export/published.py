"""Turn an exported script into the text of an upstream issue, or into a test of the engine's own suite.

Both leave out what `zharness repro` reads: the header, the signature and the marks of the verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from zharness.cell import Cell
from zharness.errors import HarnessFault
from zharness.export.script_writer import PARTS_FOLDER, Script, engine_name
from zharness.laws import get_law
from zharness.mesh import TENSOR
from zharness.run.record import Record

_CONSTANTS = {name: re.compile(rf"^{name} = .*\n", re.MULTILINE) for name in ("SIGNATURE", "OK")}
_MAIN = "\ndef main():\n"
RUN = """

if __name__ == "__main__":
    dist.init_process_group("gloo")
    wrong = main()
    if dist.get_rank() == 0:
        print("\\n".join(wrong) or "OK", flush=True)
    dist.destroy_process_group()
    sys.exit(bool(wrong))
"""
# DeepSpeed's tests have their process group from the class.
DEEPSPEED_TEST = '''

from unit.common import DistributedTest


class TestLaw(DistributedTest):
    """{statement}."""

    world_size = {ranks}

    def test_{name}(self):
        wrong = main()
        assert not wrong, "\\n".join(wrong)
'''
# A test in PyTorch's style: the base class, the settings that its tests need on a CPU, and the process group.
TORCH_TEST = '''

{imports}
from torch.testing._internal.common_utils import run_tests


class LawTest({base}):
    """{statement}."""

    @property
    def world_size(self):
        return {ranks}
{setting}
    {decorator}def test_{name}(self):
        wrong = main()
        self.assertFalse(wrong, "\\n".join(wrong))


if __name__ == "__main__":
    run_tests()
'''
DISTRIBUTED_BASE = {
    "imports": "from torch.testing._internal.common_distributed import MultiProcessTestCase",
    "base": "MultiProcessTestCase",
    "decorator": "",
    "setting": """
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def run_test(self, test_name, parent_pipe):
        where = f"file://{self.file_name}"
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=self.world_size)
        super().run_test(test_name, parent_pipe)
        dist.destroy_process_group()
""",
}
FSDP_BASE = {
    "imports": "from torch.testing._internal.common_distributed import MultiProcessTestCase\n"
    "from torch.testing._internal.common_fsdp import FSDPTest",
    "base": "FSDPTest",
    "decorator": "",
    "setting": """
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        # FSDPTest skips tests where torch counts fewer accelerators than ranks, and this one runs on the CPU.
        MultiProcessTestCase._run.__func__(cls, rank, test_name, file_name, parent_pipe, **kwargs)

    def run_test(self, test_name, parent_pipe):
        dist.init_process_group("gloo", init_method=self.init_method, rank=self.rank, world_size=self.world_size)
        super().run_test(test_name, parent_pipe)
        dist.destroy_process_group()
""",
}
DTENSOR_BASE = {
    "imports": "from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms",
    "base": "DTensorTestBase",
    "decorator": "@with_comms\n    ",
    "setting": """
    @property
    def device_type(self):
        return "cpu"
""",
}


class PublishedForm(Enum):
    """The forms that `zharness export --form` writes beside a script."""

    ISSUE = "issue"
    PYTEST = "pytest"


def render_body(script: Script) -> str:
    """Return the definitions of a standalone script, and a ``main`` that returns what is wrong.

    Raises HarnessFault for a script that imports this package's judge, which has no ``main``.
    """
    docstring, separator, rest = script.text.partition("from __future__ import annotations\n")
    if not separator or _MAIN not in rest:
        raise HarnessFault(f"the script has no main function: {docstring[:80]!r}")
    definitions = rest[: rest.index(_MAIN)]
    for name, constant in _CONSTANTS.items():
        without = constant.sub("", definitions, count=1)
        definitions = definitions if re.search(rf"\b{name}\b", without) else without
    main = (PARTS_FOLDER / "main_plain.py.txt").read_text(encoding="utf-8").partition("\n\n")[2]
    text = f"{separator}{definitions.rstrip()}\n\n\n{main.rstrip()}\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)


def render_plain_script(script: Script) -> str:
    """Return a script for torchrun that prints the wrong numbers and exits with 1, or prints OK and exits with 0."""
    return render_body(script) + RUN


def render_test(script: Script, cell: Cell) -> str:
    """Return a test module in the style of the engine's own suite: DeepSpeed's DistributedTest, or PyTorch's classes.

    The test fails while the law is broken, and passes afterwards.
    """
    statement, name = get_law(cell.law).statement, re.sub(r"\W+", "_", cell.law)
    fields = {"statement": statement[0].upper() + statement[1:], "ranks": cell.world_size, "name": name}
    template = DEEPSPEED_TEST if cell.engine_label.startswith("deepspeed") else TORCH_TEST
    tests = template.format(**fields, **find_torch_base(cell))
    return render_body(script).rstrip() + "\n" + tests


def find_torch_base(cell: Cell) -> Mapping[str, str]:
    """Return the values of TORCH_TEST's fields for the class with which PyTorch tests the engine of ``cell``.

    The class is DTensorTestBase for tensor parallelism, FSDPTest for FSDP, and MultiProcessTestCase otherwise.
    """
    if TENSOR in cell.mesh.axes:
        return DTENSOR_BASE
    return FSDP_BASE if engine_name(cell.engine) in ("fsdp1", "fsdp2") else DISTRIBUTED_BASE


def render_issue(record: Record, plain_script: str, output: str, packages: str, machine: str) -> str:
    """Return a text for an upstream issue in Markdown; its first line is the title."""
    cell = record.cell
    options = f", options {cell.engine_variant}" if cell.engine_variant else ""
    law = get_law(cell.law)
    return f"""{cell.engine_label} breaks a law: {law.statement}

Stage {cell.stage}, {cell.world_size} ranks, {cell.dtype}{options}.

### To reproduce

`torchrun --standalone --nproc_per_node={cell.world_size} script.py` with this script.py:

```python
{plain_script}```

### Expected

{law.statement[0].upper()}{law.statement[1:]}. The script prints "OK" and ends with exit code 0.

### Actual

{record.cause}. The script ends with:

```
{output}
```

### Versions

{packages}; {machine}."""
