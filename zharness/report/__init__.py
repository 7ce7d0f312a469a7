"""Records made readable: the matrix, failures in words, a page."""

from zharness.report.matrix import matrix
from zharness.report.words import failures, summary

__all__ = ["failures", "matrix", "summary"]
