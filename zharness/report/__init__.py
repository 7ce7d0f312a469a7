"""Records made readable: the matrix, failures in words, a page."""

from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix

__all__ = ["render_failures", "render_matrix", "render_summary"]
