"""What Alembic runs for a migration; the connection is given by `database.opened`."""

from alembic import context

from trinity_sync.catalog.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
