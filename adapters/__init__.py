"""An adapter's life: versions, the active/shadow pair, weights, aggregation, registry, update store."""
