"""The processes and devices of a run: how they are started, what they exchange, and how a lost one is noticed."""
