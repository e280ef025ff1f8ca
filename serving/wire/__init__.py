"""Wire formats to domain types and back; pure."""
