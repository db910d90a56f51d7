"""What training draws anew in every epoch: how often the rows of each part come, noise in texts, and cuts of words."""
