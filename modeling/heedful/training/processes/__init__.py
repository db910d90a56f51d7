"""The processes and devices of a run: what a launcher says of them, what they exchange, and which signals end them."""
