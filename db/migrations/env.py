"""Alembic's entry: runs on the connection that ``db.migrate`` opened and commits with it."""

from alembic import context

from db.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    compare_type=True,
    compare_server_default=True,
    transaction_per_migration=False,
)
context.run_migrations()
