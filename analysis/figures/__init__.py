"""From numbers to pictures, and to the words that stand on them."""
