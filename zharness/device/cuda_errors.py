"""Turn torch's messages of CUDA errors into one line with the remedy."""

from __future__ import annotations

import re

_ERROR = re.compile(r"CUDA error: (?P<text>[^\n]+)(?:\nSearch for `(?P<name>\w+)')?")
_OUT_OF_MEMORY = re.compile(r"^CUDA out of memory\.[^\n]*", re.MULTILINE)
# CUDA reports what a kernel did at a later call, so the line that raised is not the one that launched the kernel.
_KERNEL_REMEDY = (
    "an earlier kernel of this rank failed: CUDA_LAUNCH_BLOCKING=1 stops at its launch, and compute-sanitizer names it"
)
_REMEDIES = {
    "out of memory": "all ranks and cells share the GPU's memory: use fewer --jobs or a smaller --world-size",
    "ECC": "the GPU's memory is damaged, which no test can mend: 'nvidia-smi -q -d ECC' counts its errors",
}


def describe_cuda_error(message: str) -> str:
    """Return the message of a CUDA error as one line with its name and the remedy; any other message unchanged."""
    memory, error = _OUT_OF_MEMORY.search(message), _ERROR.search(message)
    if memory is not None:
        return f"{memory[0]}; {_REMEDIES['out of memory']}"
    if error is None:
        return message
    remedy = next((remedy for word, remedy in _REMEDIES.items() if word in error["text"]), _KERNEL_REMEDY)
    name = f" ({error['name']})" if error["name"] else ""
    return f"CUDA error: {error['text']}{name}; {remedy}"
