"""What only several processes need: checks of how they were launched, and a heartbeat that shows a lost one."""
