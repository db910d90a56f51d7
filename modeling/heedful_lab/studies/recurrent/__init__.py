"""Studies of recurrent cells: gradients, gates, and changed sources."""
