"""What a run saves so that it can go on after any end, and which of it is kept."""
