"""A run's processes: launch, devices, collective operations, and signals that end them."""
