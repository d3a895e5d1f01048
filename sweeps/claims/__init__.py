"""Published claims on training stability: what each says, how it is tested, and what came of it."""
