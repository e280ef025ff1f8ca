"""Alembic's scripts, as package data."""
