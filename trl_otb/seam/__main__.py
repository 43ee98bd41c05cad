"""`make drift` checks the installed TRL against the sources that were read; `make hashes` adds its own to these."""

import json
import sys

from packaging.version import Version

from ..experimental.async_grpo.parts import ASYNC_GRPO
from .contract import PINNED, tested, versions
from .older_trl import no_asynchronous_training
from .parts import CLI, GRPO, PROGRESS


CONTRACTS = (GRPO, PROGRESS, CLI) if no_asynchronous_training() else (GRPO, PROGRESS, CLI, ASYNC_GRPO)
if sys.argv[1:] == ["--hashes"]:
    known = tested()
    for package, version in versions().items():
        known["versions"][package] = max(known["versions"].get(package, version), version, key=Version)
    for contract in CONTRACTS:
        for name, source in contract.sources().items():
            known["sources"][name] = sorted({*known["sources"].get(name, []), source})
    PINNED.write_text(json.dumps(known, indent=2) + "\n")
    sys.exit()
found = {contract.trainer: (contract.gone(), contract.changed()) for contract in CONTRACTS}
for trainer, (gone, changed) in found.items():
    print(f"contract: {trainer}: {'; '.join(gone) or 'every part is there, with the expected parameters'}")
    print(f"sources: {trainer}: {', '.join(changed) + ' changed' if changed else 'those that were read'}")
sys.exit(any(gone for gone, _ in found.values()))
