"""What a text needs, how long it will take, and what memory is spent on, from numbers alone."""
