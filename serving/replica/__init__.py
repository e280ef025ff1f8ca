"""One backbone that answers requests and is fine-tuned at the same time."""
