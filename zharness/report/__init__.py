"""Render records: tables, descriptions of failures, XML, and an HTML page."""

from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix

__all__ = ["render_failures", "render_matrix", "render_summary"]
