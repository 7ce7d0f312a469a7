"""Stand in for ``import deepspeed`` in a test, with the reference engine behind DeepSpeed's names.

    pytest -p zharness.compat.deepspeed_engine.install test_file_of_deepspeed.py

``install`` puts the modules that ``modules`` lists into ``sys.modules``. ``initialize`` translates the arguments and
``configuration`` the JSON; ``engine`` and ``optimizer`` have DeepSpeed's methods; ``parameters`` has ``zero.Init`` and
``GatheredParameters``, and ``tensor_fragment`` the functions ``safe_get_*`` and ``safe_set_*``. ``unsupported`` has
names that only have to be importable. docs/deepspeed-engine.md says where the two engines differ.
"""

import sys

MARK = "__zharness_stand_in__"


def is_installed() -> bool:
    """Return whether ``import deepspeed`` imports the stand-in in this process."""
    return hasattr(sys.modules.get("deepspeed"), MARK)
