"""The processes of a run: how they are launched, their devices, what they exchange, and the signals that end them."""
