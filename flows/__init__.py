"""Prefect flows: federated rounds, their schedule, evaluation, promotion."""
