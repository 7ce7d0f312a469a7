"""Render records: tables, descriptions of failures, XML, and an HTML page."""
