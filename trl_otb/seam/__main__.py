"""`make drift` checks the installed TRL against what was read; `make hashes` records the sources that were read."""

import json
import sys

from ..experimental.async_grpo.contract import ASYNC_GRPO
from .contract import COMMAND_LINE, GRPO, READ, versions


CONTRACTS = (GRPO, ASYNC_GRPO, COMMAND_LINE)
if sys.argv[1:] == ["--hashes"]:
    sources = {name: source for contract in CONTRACTS for name, source in contract.sources().items()}
    READ.write_text(json.dumps({"versions": versions(), "sources": sources}, indent=2) + "\n")
    sys.exit()
found = {contract.trainer: (contract.gone(), contract.unread()) for contract in CONTRACTS}
for trainer, (gone, unread) in found.items():
    print(f"contract: {trainer}: {'; '.join(gone) or 'every part is there, with the expected parameters'}")
    print(f"sources: {trainer}: {', '.join(unread) + ' changed' if unread else 'those that were read'}")
sys.exit(any(gone for gone, _ in found.values()))
