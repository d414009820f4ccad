"""First schema."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

JOB = "jobs.id"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("mirrored_at", sa.Double, nullable=False),
        sa.Column("runs", sa.JSON, nullable=False),
        sa.Column("claims", sa.JSON, nullable=False),
    )
    op.create_table(
        "steps",
        sa.Column("job", sa.Text, sa.ForeignKey(JOB, ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("run", sa.BigInteger, nullable=False),
        sa.Column("kinds", sa.Text, nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("committed_at", sa.Double, nullable=False),
        sa.Column("corruption", sa.Text, nullable=False),
        sa.Column("flow_run", sa.Text),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
    )
    op.create_table(
        "weight_versions",
        sa.Column("job", sa.Text, sa.ForeignKey(JOB, ondelete="CASCADE"), primary_key=True),
        sa.Column("run", sa.BigInteger, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("published_at", sa.Double, nullable=False),
    )
