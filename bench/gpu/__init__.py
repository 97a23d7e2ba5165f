"""The GPU day: what only a GPU can tell, in parts that go on where another one fails."""
