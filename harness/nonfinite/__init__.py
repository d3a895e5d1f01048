"""Non-finite values: which operation made the first one, and which tensor it came from; told from values alone."""
