"""How much memory a pack takes: counted before it is trained, and measured."""
