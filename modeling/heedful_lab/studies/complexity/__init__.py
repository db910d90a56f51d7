"""Table 1 of the paper, measured: what a layer of each kind costs, and how far it reaches."""
