"""Skipped where TRL has no such trainer, or has moved its parts."""

import pytest


pytest.importorskip("trl_otb.experimental.async_grpo.worker", exc_type=ImportError)
