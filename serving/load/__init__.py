"""Open-loop load from public traces, and the report on it."""
