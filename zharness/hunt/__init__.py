"""Hunt for unknown failures of an engine: draw programs and settings, run them, shrink, group and export alarms."""
