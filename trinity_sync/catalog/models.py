"""Tables of the catalog, for queries that span steps and jobs.

All rows can be rebuilt from the files, except the flow run that committed a step, and the versions
of the weights that the Synchronizer's file no longer lists. Values that no query selects by are
JSON columns.
"""

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

VALUES = "values"
"""Key of a JSON column's ``info``: the type of the values of the object, see `read_rows`."""


class Base(DeclarativeBase):
    """Base class of all tables."""


class Job(Base):
    """A job, identified by its root."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    """See `layout.job_id`."""
    root: Mapped[str] = mapped_column(Text)
    mirrored_at: Mapped[float] = mapped_column(Double)
    """When its files were last read, in seconds since the epoch."""
    runs: Mapped[dict[str, int]] = mapped_column(JSON, info={VALUES: int})
    """The step that each run resumed from, by the run's number."""
    claims: Mapped[dict[str, str]] = mapped_column(JSON, info={VALUES: str})
    """Pins, tags and leases at that time, such as ``leased by explorer``, by ``step/file name``."""


class Step(Base):
    """A committed step."""

    __tablename__ = "steps"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger)
    kinds: Mapped[str] = mapped_column(Text)
    """Comma-separated."""
    nbytes: Mapped[int] = mapped_column(BigInteger)
    committed_at: Mapped[float] = mapped_column(Double)
    corruption: Mapped[str] = mapped_column(Text)
    """Why the step is corrupted; empty for a valid step."""
    flow_run: Mapped[str | None] = mapped_column(Text)
    """Prefect's id of the flow run that committed the step, if it is known."""
    metrics: Mapped[dict[str, float]] = mapped_column(JSON, info={VALUES: (float, int)})
    """Metrics of the step, by name."""
    files: Mapped[dict[str, str]] = mapped_column(JSON, info={VALUES: str})
    """Digest of each file of its manifest, by path."""


class WeightVersion(Base):
    """A version of the weights in the state file of a job's Synchronizer when it was read.

    The file lists the last eight versions and the newest of each source, so versions that are
    published between two reads may be missing. Rows are removed only with the job's.
    """

    __tablename__ = "weight_versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    source: Mapped[str] = mapped_column(Text, primary_key=True)
    """``memory``, ``checkpoint`` or ``nccl``."""
    published_at: Mapped[float] = mapped_column(Double)
    """When the Synchronizer registered it, in seconds since the epoch."""
