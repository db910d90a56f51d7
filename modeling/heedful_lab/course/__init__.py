"""What the course shows of a model: attention in numbers, a word among its neighbours, and the gates of cells."""
