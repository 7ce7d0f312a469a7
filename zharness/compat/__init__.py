"""Test classes of other projects, with their names and manners, on the ranks of this one."""
