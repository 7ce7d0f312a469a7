"""Draw the badge of an engine release as an SVG that loads nothing."""

from __future__ import annotations

from zharness.site.table import Tally

LABEL = "laws"
CHARACTER_WIDTH = 7  # pixels of an average character of 11-pixel text; textLength fits the text to it in every font
PADDING = 6  # pixels on each side of a text
HOLDS_COLOUR, BROKEN_COLOUR, LABEL_COLOUR = "#1a6b3a", "#a4260f", "#3b434b"  # white text has a contrast above 4.5


def describe_badge(tally: Tally) -> dict[str, object]:
    """Return the values of the badge's template: its texts, widths in pixels, and the colour."""
    label_width = len(LABEL) * CHARACTER_WIDTH
    words_width = len(tally.counts) * CHARACTER_WIDTH
    return {
        "title": f"{tally.column.title}, laws of zharness: {tally.counts}",
        "label": LABEL,
        "words": tally.counts,
        "padding": PADDING,
        "label_width": label_width,
        "words_width": words_width,
        "split": label_width + 2 * PADDING,
        "width": label_width + words_width + 4 * PADDING,
        "label_colour": LABEL_COLOUR,
        "words_colour": BROKEN_COLOUR if tally.broken else HOLDS_COLOUR,
    }
