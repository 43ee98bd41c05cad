"""
Runs quickstart.ipynb in a fresh kernel and stores its outputs, before a release:

    python -m recipes.notebook    # two minutes on a core

Its first code cell, which installs the package, is not run, so that this checkout is what runs.
"""

import copy
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat


PATH = Path(__file__).with_name("quickstart.ipynb")


def executed(notebook: Any, install: str, **environment: str) -> Any:
    """A copy of the notebook, run top to bottom in a fresh kernel, with `install` in the place of its first cell."""
    result = copy.deepcopy(notebook)
    (first,) = (cell for cell in result.cells if cell.source.startswith("%pip"))
    before, first.source = first.source, install
    client = nbclient.NotebookClient(
        result,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(PATH.parent)}},
    )
    client.execute(env={**os.environ, **environment})
    first.source = before
    return result


if __name__ == "__main__":
    result = executed(nbformat.read(PATH, as_version=4), "pass", PYTHONPATH=str(PATH.parents[1]))
    nbformat.write(result, PATH)
