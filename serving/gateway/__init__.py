"""The contract of a single server in front of the fleet."""
