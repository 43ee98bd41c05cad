"""As for the recipes: every test runs in a folder and with caches of its own."""

from tests.recipes.conftest import elsewhere  # noqa: F401
