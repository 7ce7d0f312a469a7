"""Write the README into the metadata of a wheel or sdist with links that work on a page of a package index.

hatchling runs this script during a build (``[tool.hatch.metadata.hooks.custom]`` in pyproject.toml). A link of the
README to a file of the repository leads to the folder that ZHARNESS_SOURCE_URL names; release.yml sets it to
``https://github.com/OWNER/zharness/blob/v0.1.0``. Without that variable, as in a build by hand, only the text of such a
link remains, because the link would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCE_VARIABLE = "ZHARNESS_SOURCE_URL"
_LINK = re.compile(r"(?P<sign>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def make_absolute(text: str, source: str) -> str:
    """Return Markdown whose links to files lead to the folder ``source``; if it is empty, keep only their text."""

    def replace(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        if not source:
            return found["text"] if not found["sign"] else ""
        folder = source.replace("/blob/", "/raw/") if found["sign"] else source
        return f"{found['sign']}[{found['text']}]({folder}/{target})"

    parts = _CODE.split(text)  # every second part is a block of code
    return "".join(part if at % 2 else _LINK.sub(replace, part) for at, part in enumerate(parts))


class ReadmeMetadata(MetadataHookInterface):
    """The fields ``readme`` and ``urls`` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields."""
        source = os.environ.get(SOURCE_VARIABLE, "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_absolute(text, source)}
        metadata["urls"] = (
            {
                "Source": source.partition("/blob/")[0],
                "Documentation": f"{source}/README.md",
                "Changelog": f"{source}/CHANGELOG.md",
                "Issues": f"{source.partition('/blob/')[0]}/issues",
            }
            if source
            else {}
        )
