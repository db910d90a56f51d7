"""Table 1 of the paper, measured: each kind of layer's costs and reach."""
