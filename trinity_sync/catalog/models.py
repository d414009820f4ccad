"""The catalog's tables: what the files of all jobs say, for questions that span steps and jobs.

All of it can be read from the files again, except the flow run that committed a step, and the
versions of the weights that the Synchronizer's file has forgotten. What no question selects by is
JSON beside its row.
"""

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

VALUES = "values"
"""Key of a JSON column's ``info``: the type of the values of its object; see `read_rows`."""


class Base(DeclarativeBase):
    """All tables."""


class Job(Base):
    """One training, by the folder of its files."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    """As `layout.job_id`."""
    root: Mapped[str] = mapped_column(Text)
    mirrored_at: Mapped[float] = mapped_column(Double)
    """When its files were last read, in seconds since the epoch."""
    runs: Mapped[dict[str, int]] = mapped_column(JSON, info={VALUES: int})
    """The step that each run resumed from, by the run's number."""
    claims: Mapped[dict[str, str]] = mapped_column(JSON, info={VALUES: str})
    """Pins, tags and leases at that time: what holds a step, such as ``leased by explorer``, by
    ``step/name of its file``."""


class Step(Base):
    """One committed step."""

    __tablename__ = "steps"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger)
    kinds: Mapped[str] = mapped_column(Text)
    """With commas between them."""
    nbytes: Mapped[int] = mapped_column(BigInteger)
    committed_at: Mapped[float] = mapped_column(Double)
    damage: Mapped[str] = mapped_column(Text)
    """What is wrong with its files; empty for a valid step."""
    flow_run: Mapped[str | None] = mapped_column(Text)
    """Prefect's id of the flow run that committed it, where that is known."""
    metrics: Mapped[dict[str, float]] = mapped_column(JSON, info={VALUES: (float, int)})
    """What was measured at the step, by name."""
    files: Mapped[dict[str, str]] = mapped_column(JSON, info={VALUES: str})
    """Digest of each file of its manifest, by path."""


class WeightVersion(Base):
    """A version of the weights that a job's Synchronizer knew when its files were read.

    It remembers the last eight and the newest of each source, so of versions from memory that
    follow each other quickly, those between two reads are missing. Rows stay.
    """

    __tablename__ = "weight_versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    source: Mapped[str] = mapped_column(Text, primary_key=True)
    """``memory``, ``checkpoint`` or ``nccl``."""
    published_at: Mapped[float] = mapped_column(Double)
    """When the Synchronizer learned of it, in seconds since the epoch."""
