"""Versions of the weights."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Make the table; the next look at a job fills it."""
    op.create_table(
        "weight_versions",
        sa.Column("job", sa.Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("run", sa.BigInteger, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("published_at", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("weight_versions")
