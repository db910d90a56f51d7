"""Studies of recurrent cells: their gradients, their gates, and how they bear changed sources."""
