"""`make drift` checks the installed TRL against the seam; `make hashes` records the sources that were read."""

import json
import sys

import trl

from .contract import READ, check_trl, drift, source_hashes, versions


if sys.argv[1:] == ["--hashes"]:
    READ.write_text(json.dumps({"versions": versions(), "sources": source_hashes()}, indent=2) + "\n")
    sys.exit()
try:
    check_trl()
    from .asynchronous import check_async_trl

    check_async_trl()
except ImportError as moved:
    sys.exit(f"contract: {moved}")
print(f"contract: trl {trl.__version__} has every part that trl_otb relies on, with the parameters it expects")
if (message := drift()) is not None:
    sys.exit(f"sources: {message}")
print("sources: those that were read")
