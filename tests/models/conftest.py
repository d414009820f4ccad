"""The job of the unit tests, for campaigns."""

from tests.unit.conftest import job as job
