"""What a plan costs: memory over the timeline of a step, and time. Pure functions of values."""
