"""Drop-in replacements for the test classes of PyTorch: change the module of an import in its test files.

``torch.testing._internal.common_distributed``, ``common_fsdp`` and ``distributed._tensor.common_dtensor`` become
``zharness.compat.pytorch.common_distributed``, ``common_fsdp`` and ``common_dtensor``. Each module has every name of
PyTorch's module; the classes that spawn processes are replaced by subclasses that run on this package's ranks.

The classes differ from PyTorch's in six ways. ``setUp``, ``tearDown``, ``setUpClass`` and ``tearDownClass`` run on
every rank, not in the process that spawns the ranks. After a failed test, the other tests of a MultiProcContinuousTest
run on new ranks instead of being skipped. A test fails if any rank exits with an unexpected status, not only if rank 0
does. A test that only some of its ranks skip fails. A test whose world size is 0 is skipped; PyTorch's passes without
having run. A test cannot expect to be ended by a signal.

Under pytest, ranks are forked from a server that has collected the tests. ``python test_file.py`` works as well: then
each test has a server of its own.

With the environment variable ``ZHARNESS_CPU_DEVICES=N``, a machine without accelerator counts as one with N devices, so
that tests that need accelerators run on CPUs (``zharness.compat.pytorch.cpu_devices``).
"""
