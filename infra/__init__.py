"""What everything stands on: settings, errors, clock, logging, metrics, the command line, the local cluster."""
