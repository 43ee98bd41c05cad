"""`make drift` checks the installed TRL against what was read; `make hashes` records the sources that were read."""

import json
import sys

from ..experimental.async_grpo.contract import ASYNC_GRPO
from .contract import CLI, GRPO, PINNED, versions


CONTRACTS = (GRPO, ASYNC_GRPO, CLI)
if sys.argv[1:] == ["--hashes"]:
    sources = {name: source for contract in CONTRACTS for name, source in contract.sources().items()}
    PINNED.write_text(json.dumps({"versions": versions(), "sources": sources}, indent=2) + "\n")
    sys.exit()
found = {contract.trainer: (contract.gone(), contract.changed()) for contract in CONTRACTS}
for trainer, (gone, changed) in found.items():
    print(f"contract: {trainer}: {'; '.join(gone) or 'every part is there, with the expected parameters'}")
    print(f"sources: {trainer}: {', '.join(changed) + ' changed' if changed else 'those that were read'}")
sys.exit(any(gone for gone, _ in found.values()))
