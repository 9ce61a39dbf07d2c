"""What a run is: its configuration, its folder, its checkpoints, and how to open one again."""
