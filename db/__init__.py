"""Records, tables, migrations and queries by noun; rows never leave this package."""
