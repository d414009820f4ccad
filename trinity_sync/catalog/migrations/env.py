"""Run a migration with Alembic, on the connection of `database.open_catalog`."""

from alembic import context

from trinity_sync.catalog.database import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
