"""What a person starts: the demo, the tests and the training program."""
