"""What was measured, and how: README.md."""

from importlib.util import find_spec


if find_spec("scipy") is None:
    raise SystemExit("scipy is not installed, and the studies need it: pip install -e '.[studies]'")
