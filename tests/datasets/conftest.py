"""The cache and the tasks of tests/evaluation."""

from tests.evaluation.conftest import _cache, own_task  # noqa: F401 - fixtures
