"""
`make drift` and `make hashes`: whether the installed TRL is what the seam expects, and the sources it was read in.
"""

import json
import sys

import trl

from .contract import check_trl, source_hashes


if sys.argv[1:] == ["--hashes"]:
    print(json.dumps(source_hashes(), indent=2))
    sys.exit()
try:
    check_trl()
except ImportError as drift:
    sys.exit(f"contract: {drift}")
print(f"contract: trl {trl.__version__} has every part that trl_otb relies on, with the parameters it expects")
