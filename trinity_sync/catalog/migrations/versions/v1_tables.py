"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

JOB = "jobs.id"
STEP = (["job", "step"], ["steps.job", "steps.step"])


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("mirrored_at", sa.Double, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("job", sa.Text, sa.ForeignKey(JOB, ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("resumed_from", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "steps",
        sa.Column("job", sa.Text, sa.ForeignKey(JOB, ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("run", sa.BigInteger, nullable=False),
        sa.Column("kinds", sa.Text, nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("committed_at", sa.Double, nullable=False),
        sa.Column("damage", sa.Text, nullable=False),
        sa.Column("flow_run", sa.Text),
    )
    op.create_table(
        "shards",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("component", sa.Text, nullable=False),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(*STEP, ondelete="CASCADE"),
    )
    op.create_table(
        "metrics",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(*STEP, ondelete="CASCADE"),
    )
    op.create_table(
        "claims",
        sa.Column("job", sa.Text, sa.ForeignKey(JOB, ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Remove them; the files can fill them again."""
    for table in ("claims", "metrics", "shards", "steps", "runs", "jobs"):
        op.drop_table(table)
