"""The catalog's tables: what the files of all jobs say, for questions that span steps and jobs.

Nothing is in here that cannot be read from the files again, but for the flow run that made a step,
and the versions of the weights that the Synchronizer's file has forgotten.
"""

from sqlalchemy import BigInteger, Double, ForeignKey, ForeignKeyConstraint, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables."""


class Job(Base):
    """One training, by the folder of its files."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    """As `layout.job_id`."""
    root: Mapped[str] = mapped_column(Text)
    mirrored_at: Mapped[float] = mapped_column(Double)
    """When its files were last looked at, in seconds since the epoch."""


class Run(Base):
    """One start of a job."""

    __tablename__ = "runs"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    resumed_from: Mapped[int] = mapped_column(BigInteger)


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
    """What is wrong with its files; empty for a whole step."""
    flow_run: Mapped[str | None] = mapped_column(Text)
    """Prefect's id of the flow run that committed it, where that is known."""


class Shard(Base):
    """One file of a step."""

    __tablename__ = "shards"
    __table_args__ = (
        ForeignKeyConstraint(["job", "step"], ["steps.job", "steps.step"], ondelete="CASCADE"),
    )

    job: Mapped[str] = mapped_column(Text, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    role: Mapped[str] = mapped_column(Text)
    component: Mapped[str] = mapped_column(Text)
    rank: Mapped[int] = mapped_column(BigInteger)
    world_size: Mapped[int] = mapped_column(BigInteger)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(Text)


class Metric(Base):
    """What was measured at a step."""

    __tablename__ = "metrics"
    __table_args__ = (
        ForeignKeyConstraint(["job", "step"], ["steps.job", "steps.step"], ondelete="CASCADE"),
    )

    job: Mapped[str] = mapped_column(Text, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    value: Mapped[float] = mapped_column(Double)


class WeightVersion(Base):
    """A version of the weights that a job's Synchronizer knew when its files were looked at.

    It remembers the last eight and the newest of each source, so of versions from memory that
    follow each other quickly, those between two looks are missing. Rows stay.
    """

    __tablename__ = "weight_versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    source: Mapped[str] = mapped_column(Text, primary_key=True)
    """``memory``, ``checkpoint`` or ``nccl``."""
    published_at: Mapped[float] = mapped_column(Double)
    """When the Synchronizer learned of it, in seconds since the epoch."""


class Claim(Base):
    """A pin, a tag or a lease, as it was when the job was last looked at."""

    __tablename__ = "claims"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    """Name of its file."""
    step: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(Text)
    """``pin``, ``tag`` or ``lease``."""
    holder: Mapped[str] = mapped_column(Text)
    """Who reads, or the tag and why it is pinned."""
