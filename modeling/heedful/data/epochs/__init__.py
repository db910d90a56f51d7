"""What training draws anew in every epoch: how often the rows of each part come, and noise in texts."""
