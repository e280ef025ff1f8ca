"""The fast timescale: every time slot, observe, decide, apply."""
